//! Annex layout and trampolines.
