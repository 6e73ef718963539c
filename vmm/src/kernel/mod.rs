//! Understanding a kernel image; no KVM, no I/O but reading.
