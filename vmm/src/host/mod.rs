//! Is KVM usable here? The emulated host otherwise.
