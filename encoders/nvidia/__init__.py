"""The towers of NVIDIA: C-RADIO, alone and in Nemotron, and that of Cosmos3-Edge."""
