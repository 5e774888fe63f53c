"""Generated from protos/heterorl; do not edit."""
