"""Passes: decisions (inventory + costs → Plan) and rewrites (graph + Plan → graph), one a file."""
