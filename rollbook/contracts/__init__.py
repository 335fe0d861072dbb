"""WORDS: what the rooms share. Standard library and numpy; nothing here opens a file or a socket."""
