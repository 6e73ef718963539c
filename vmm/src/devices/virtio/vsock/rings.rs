//! The device's queues, and the guest memory that their descriptors name.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{
    GuestMemory, GuestMemoryMmap, Permissions, ReadVolatile, VolatileMemoryError, VolatileSlice,
    WriteVolatile,
};

use super::packet::{Header, MAX_PAYLOAD};
use crate::devices::virtio::{Activation, Broken, Interrupt};

/// Descriptors that a packet may have. Linux has one for each page at most.
const MAX_DESCRIPTORS: usize = 256;

/// Guest memory that a chain of descriptors names: bytes of a packet, one after the other.
pub(super) struct Span<'m> {
    slices: VecDeque<VolatileSlice<'m>>,
    length: usize,
}

impl<'m> Span<'m> {
    /// At most `limit` bytes; a driver could name any number.
    fn new(
        memory: &'m GuestMemoryMmap,
        descriptors: impl Iterator<Item = Descriptor>,
        limit: usize,
    ) -> Result<Span<'m>, Broken> {
        let mut span = Span { slices: VecDeque::with_capacity(2), length: 0 };
        for (count, descriptor) in descriptors.enumerate() {
            let length = (descriptor.len() as usize).min(limit - span.length);
            if count == MAX_DESCRIPTORS {
                return Err(Broken);
            }
            if length == 0 {
                continue;
            }
            let slices =
                GuestMemory::get_slices(memory, descriptor.addr(), length, Permissions::ReadWrite)
                    .map_err(|_| Broken)?;
            for slice in slices {
                span.slices.push_back(slice.map_err(|_| Broken)?);
            }
            span.length += length;
        }
        Ok(span)
    }

    /// All of a memory.
    #[cfg(test)]
    pub(super) fn of_all(memory: &'m GuestMemoryMmap) -> Span<'m> {
        use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
        let all = |region| GuestMemoryRegion::as_volatile_slice(region).unwrap();
        let slices: VecDeque<_> = memory.iter().map(all).collect();
        let length = slices.iter().map(VolatileSlice::len).sum();
        Span { slices, length }
    }

    /// Bytes left.
    pub(super) fn len(&self) -> usize {
        self.length
    }

    fn advance(&mut self, mut bytes: usize) {
        bytes = bytes.min(self.length);
        self.length -= bytes;
        while let Some(first) = self.slices.front_mut() {
            if bytes < first.len() {
                // Within bounds: cannot fail.
                if let Ok(rest) = first.offset(bytes) {
                    *first = rest;
                }
                return;
            }
            bytes -= first.len();
            self.slices.pop_front();
        }
    }

    /// Forgets all but the first `bytes`.
    fn truncate(&mut self, bytes: usize) {
        let mut left = bytes.min(self.length);
        self.length = left;
        for slice in &mut self.slices {
            if let Ok(part) = slice.subslice(0, left.min(slice.len())) {
                *slice = part;
            }
            left -= slice.len();
        }
    }

    /// The first `bytes`, leaving the rest.
    fn split_off_front(&mut self, bytes: usize) -> Span<'m> {
        let mut front = Span { slices: self.slices.clone(), length: self.length };
        front.truncate(bytes);
        self.advance(bytes);
        front
    }

    /// Reads from the guest, as much as there is.
    fn read(&mut self, mut to: &mut [u8]) {
        while let Some(first) = self.slices.front().filter(|_| !to.is_empty() && self.length > 0) {
            let count = first.copy_to(to);
            to = &mut to[count..];
            self.advance(count);
        }
    }

    /// Writes to the guest, as much as there is room.
    pub(super) fn write(&mut self, mut from: &[u8]) {
        while let Some(first) = self.slices.front().filter(|_| !from.is_empty() && self.length > 0)
        {
            let count = first.len().min(from.len());
            first.copy_from(&from[..count]);
            from = &from[count..];
            self.advance(count);
        }
    }

    /// Moves all of it from the guest into `buffer`.
    pub(super) fn append_to(&mut self, buffer: &mut VecDeque<u8>) {
        let mut part = [0; 4096];
        while self.length > 0 {
            let count = part.len().min(self.length);
            self.read(&mut part[..count]);
            buffer.extend(&part[..count]);
        }
    }

    /// Moves bytes from the guest into a socket; how many. Fails only if there were none.
    pub(super) fn send(&mut self, socket: &UnixStream) -> io::Result<usize> {
        let mut total = 0;
        while let Some(first) = self.slices.front().filter(|_| self.length > 0) {
            let length = first.len();
            match interruptible(|| (&*socket).write_volatile(first)) {
                Ok(count) => {
                    total += count;
                    self.advance(count);
                    if count < length {
                        break;
                    }
                }
                Err(error) if total == 0 => return Err(error),
                // The next call will say the same.
                Err(_) => break,
            }
        }
        Ok(total)
    }

    /// Moves bytes from a socket to the guest, at most `limit`; how many, 0 at the stream's end.
    /// Fails only if there were none.
    pub(super) fn receive(&mut self, socket: &UnixStream, limit: usize) -> io::Result<usize> {
        self.truncate(limit);
        let mut total = 0;
        while let Some(first) = self.slices.front_mut().filter(|_| self.length > 0) {
            let length = first.len();
            match interruptible(|| (&*socket).read_volatile(first)) {
                Ok(count) => {
                    total += count;
                    self.advance(count);
                    if count < length {
                        break;
                    }
                }
                Err(error) if total == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(total)
    }
}

fn interruptible(
    mut call: impl FnMut() -> Result<usize, VolatileMemoryError>,
) -> io::Result<usize> {
    loop {
        match call() {
            Ok(count) => return Ok(count),
            Err(VolatileMemoryError::IOError(error)) => {
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            Err(error) => return Err(io::Error::other(error)),
        }
    }
}

/// The device's side of its queues while a driver is there.
pub(super) struct Rings {
    memory: GuestMemoryMmap,
    to_guest: Queue,
    from_guest: Queue,
    interrupt: Arc<Interrupt>,
    /// Buffers have been used since the driver was last told.
    used: [bool; 2],
}

/// An empty buffer of the driver.
pub(super) struct Slot<'m> {
    pub(super) head: u16,
    pub(super) header: Span<'m>,
    pub(super) payload: Span<'m>,
}

impl Rings {
    /// Takes the receive and the transmit queue. The third, for events, is not needed: the only
    /// event is that the host has lost all connections by migration.
    pub(super) fn new(active: Activation) -> Result<Rings, Broken> {
        let mut queues = active.queues.into_iter();
        let (Some(Some(to_guest)), Some(Some(from_guest))) = (queues.next(), queues.next()) else {
            return Err(Broken);
        };
        let (memory, interrupt) = (active.memory, active.interrupt);
        let mut rings = Rings { memory, to_guest, from_guest, interrupt, used: [false; 2] };
        rings.to_guest.disable_notification(&rings.memory)?;
        rings.from_guest.disable_notification(&rings.memory)?;
        Ok(rings)
    }

    /// Takes the next packet of the driver; whether there was one. What is no packet is dropped.
    pub(super) fn receive(&mut self, take: impl FnOnce(Header, Span<'_>)) -> Result<bool, Broken> {
        let Some(chain) = self.from_guest.iter(&self.memory)?.next() else { return Ok(false) };
        let head = chain.head_index();
        let limit = Header::LENGTH + MAX_PAYLOAD as usize;
        let mut span = Span::new(&self.memory, chain.readable(), limit)?;
        if span.len() >= Header::LENGTH {
            let mut bytes = [0; Header::LENGTH];
            span.read(&mut bytes);
            let header: Header = zerocopy::transmute!(bytes);
            let length = header.len.get() as usize;
            if length <= span.len() {
                span.truncate(length);
                take(header, span);
            }
        }
        self.from_guest.add_used(&self.memory, head, 0)?;
        self.used[1] = true;
        Ok(true)
    }

    /// An empty buffer of the driver, if there is one. It is to be used or put back.
    pub(super) fn slot(&mut self) -> Result<Option<Slot<'_>>, Broken> {
        let Some(chain) = self.to_guest.iter(&self.memory)?.next() else { return Ok(None) };
        let head = chain.head_index();
        let limit = Header::LENGTH + MAX_PAYLOAD as usize;
        let mut payload = Span::new(&self.memory, chain.writable(), limit)?;
        // A buffer for nothing but a header would never take any data.
        if payload.len() <= Header::LENGTH {
            return Err(Broken);
        }
        let header = payload.split_off_front(Header::LENGTH);
        Ok(Some(Slot { head, header, payload }))
    }

    /// A slot now has so many bytes.
    pub(super) fn use_slot(&mut self, head: u16, bytes: u32) -> Result<(), Broken> {
        self.to_guest.add_used(&self.memory, head, bytes)?;
        self.used[0] = true;
        Ok(())
    }

    /// The slot that was taken last is not needed.
    pub(super) fn put_back(&mut self) {
        self.to_guest.go_to_previous_position();
    }

    /// Has the driver say when it adds buffers to the receive queue; whether there are some now.
    pub(super) fn await_slots(&mut self) -> Result<bool, Broken> {
        Ok(self.to_guest.enable_notification(&self.memory)?)
    }

    /// Has the driver say when it adds packets; whether there are some now.
    pub(super) fn await_packets(&mut self) -> Result<bool, Broken> {
        Ok(self.from_guest.enable_notification(&self.memory)?)
    }

    /// Tells the driver about used buffers, if it wants to know.
    pub(super) fn tell(&mut self) -> Result<(), Broken> {
        let mut wanted = false;
        for (queue, used) in [&mut self.to_guest, &mut self.from_guest].into_iter().zip(self.used) {
            wanted |= used && queue.needs_notification(&self.memory)?;
        }
        self.used = [false; 2];
        if wanted {
            self.interrupt.used_buffers();
        }
        Ok(())
    }

    /// Asks the driver for a reset.
    pub(super) fn needs_reset(&self) {
        self.interrupt.needs_reset();
    }
}
