"""Measurements that are not tests."""
