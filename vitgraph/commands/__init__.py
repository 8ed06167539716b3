"""The smaller commands, one module each; torch is imported when a command needs it."""
