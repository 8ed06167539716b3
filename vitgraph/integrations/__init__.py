"""Encoders inside other libraries: one module per library, which alone imports it.

See ``docs/integrations.md``. Nothing is imported here, so that no library is needed before its
module is.
"""
