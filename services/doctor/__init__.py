"""`heterorl doctor`: measures what a node needs of its link and its machine, and says what to do about each lack."""
