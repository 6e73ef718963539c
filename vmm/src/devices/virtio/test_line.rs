//! An interrupt line for tests that counts its interrupts.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::devices::IrqLine;

#[derive(Default)]
pub(super) struct Line(pub(super) AtomicUsize);

impl IrqLine for Line {
    fn assert(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn deassert(&self) {}
}
