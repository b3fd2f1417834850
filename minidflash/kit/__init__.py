"""Everything around the lesson; rooms never import it."""

import warnings

# In a notebook transformers would like a progress bar made of widgets. We show none, and a
# warning with the paths of your machine would be the first thing that you read.
warnings.filterwarnings("ignore", message="IProgress not found")
