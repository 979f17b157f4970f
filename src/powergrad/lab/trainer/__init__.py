"""Our own training: recipe, networks, session, run folder, export."""
