"""Everything around the lesson; rooms never import it."""
