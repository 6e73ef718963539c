//! A bell, by which other threads and KVM wake a subscriber.

use std::io;
use std::sync::Arc;

use event_manager::{EventSet, Events};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// An event descriptor, which clones share. Every ring is an edge, so that nobody has to read it.
#[derive(Clone, Debug)]
pub struct Bell(Arc<EventFd>);

impl Bell {
    /// A new one.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(EventFd::new(EFD_NONBLOCK)?)))
    }

    /// Has the subscriber called, once for any number of rings before that.
    pub fn ring(&self) {
        // Fails only when it has been rung 2^64 times.
        let _ = self.0.write(1);
    }

    /// For those who ring by it themselves.
    #[must_use]
    pub fn descriptor(&self) -> &EventFd {
        &self.0
    }

    /// What to wait for; its event has this data.
    #[must_use]
    pub fn events(&self, data: u32) -> Events {
        Events::with_data(&*self.0, data, EventSet::IN | EventSet::EDGE_TRIGGERED)
    }
}

/// Whether they are the same.
impl PartialEq for Bell {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Bell {}
