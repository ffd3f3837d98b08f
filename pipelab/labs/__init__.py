"""The course's experiments. They return plain data, and the command line prints it."""
