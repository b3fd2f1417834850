"""Everything around the lesson: models, text, recipes, pictures and the machinery of the course."""
