"""What a run looks like on paper: figures and a summary as text and HTML, from plain data.

Nothing here reads the store; matplotlib is imported when a figure is first drawn.
"""
