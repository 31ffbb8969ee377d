"""The language of the rewritten graph: layouts, the logical ops, and what they look like on the wire.

Passes and runtime both speak it and import nothing of each other.
"""
