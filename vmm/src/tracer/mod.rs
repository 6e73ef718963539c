//! Plan, annex, patching, rings: knows guest memory and a pause, never KVM.
