"""The towers of NVIDIA: C-RADIO, alone and in Nemotron."""
