"""The demonstration: a whole run on one machine, as the operating system processes of a real one."""
