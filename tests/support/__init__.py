"""What tests of several services share."""
