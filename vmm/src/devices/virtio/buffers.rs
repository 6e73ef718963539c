//! Guest memory that descriptors name, for devices that move data in pieces.

use std::collections::VecDeque;

use virtio_queue::DescriptorChain;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::Broken;

/// A chain of descriptors: what the driver gives, and where it wants something.
pub(super) struct Chain {
    pub(super) head: u16,
    pub(super) from_guest: Buffers,
    pub(super) to_guest: Buffers,
}

impl Chain {
    /// What a chain names, which may be anything.
    ///
    /// # Errors
    /// When it has more descriptors than this.
    pub(super) fn new(
        chain: DescriptorChain<&GuestMemoryMmap>,
        most: u16,
    ) -> Result<Chain, Broken> {
        let head = chain.head_index();
        let (mut from_guest, mut to_guest) = (Buffers::default(), Buffers::default());
        for (count, descriptor) in chain.enumerate() {
            if count == usize::from(most) {
                return Err(Broken);
            }
            let to = if descriptor.is_write_only() { &mut to_guest } else { &mut from_guest };
            to.push(&descriptor);
        }
        Ok(Chain { head, from_guest, to_guest })
    }
}

/// There is no such memory, or not so much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unreachable;

/// Memory of the guest, as its descriptors name it: looked at only when bytes are moved.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    rest: VecDeque<(GuestAddress, u32)>,
    /// Bytes that are left.
    pub(super) length: u64,
    /// Bytes that were moved.
    moved: u64,
}

impl Buffers {
    fn push(&mut self, descriptor: &Descriptor) {
        if descriptor.len() > 0 {
            self.rest.push_back((descriptor.addr(), descriptor.len()));
            self.length += u64::from(descriptor.len());
        }
    }

    /// Bytes that were moved.
    pub(super) fn moved(&self) -> u64 {
        self.moved
    }

    /// Takes the last byte away.
    pub(super) fn pop_byte(&mut self) -> Option<GuestAddress> {
        let (address, length) = self.rest.pop_back()?;
        let left = length - 1;
        self.length -= 1;
        if left > 0 {
            self.rest.push_back((address, left));
        }
        address.0.checked_add(left.into()).map(GuestAddress)
    }

    /// The next bytes from the guest, all of them.
    pub(super) fn read(
        &mut self,
        memory: &GuestMemoryMmap,
        to: &mut [u8],
    ) -> Result<(), Unreachable> {
        self.each(to.len(), |address, at| memory.read_slice(&mut to[at], address).is_ok())
    }

    /// The next bytes for the guest, all of them.
    pub(super) fn write(
        &mut self,
        memory: &GuestMemoryMmap,
        from: &[u8],
    ) -> Result<(), Unreachable> {
        self.each(from.len(), |address, at| memory.write_slice(&from[at], address).is_ok())
    }

    fn each(
        &mut self,
        count: usize,
        mut step: impl FnMut(GuestAddress, std::ops::Range<usize>) -> bool,
    ) -> Result<(), Unreachable> {
        let mut done = 0;
        while done < count {
            let (address, length) = self.rest.pop_front().ok_or(Unreachable)?;
            let part = usize::try_from(length).unwrap_or(usize::MAX).min(count - done);
            if !step(address, done..done + part) {
                return Err(Unreachable);
            }
            done += part;
            // Not more than `length`.
            let part = u32::try_from(part).unwrap_or(length);
            self.length -= u64::from(part);
            self.moved += u64::from(part);
            if part < length {
                let next = address.0.checked_add(part.into()).ok_or(Unreachable)?;
                self.rest.push_front((GuestAddress(next), length - part));
            }
        }
        Ok(())
    }
}
