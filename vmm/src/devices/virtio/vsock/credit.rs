//! Credit: how much each side may send (virtio 1.2, section 5.10.6.3).

use super::packet::Header;

/// The counters of one connection. All are modulo 2^32.
#[derive(Debug)]
pub(super) struct Credit {
    /// Bytes that we can hold for this connection.
    capacity: u32,
    /// Bytes of the guest that we hold.
    held: u32,
    /// Bytes of the guest that we have passed on so far.
    forwarded: u32,
    /// What the guest knows of `forwarded`.
    told: u32,
    /// Bytes that the guest can hold.
    guest_capacity: u32,
    /// Bytes that the guest has passed on so far.
    guest_forwarded: u32,
    /// Bytes that we have sent so far.
    sent: u32,
}

/// The guest has sent more than it may.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Exceeded;

impl Credit {
    /// Counters of a new connection.
    pub(super) fn new(capacity: u32) -> Credit {
        Credit {
            capacity,
            held: 0,
            forwarded: 0,
            told: 0,
            guest_capacity: 0,
            guest_forwarded: 0,
            sent: 0,
        }
    }

    /// The guest says how much it can hold and has passed on.
    pub(super) fn guest_says(&mut self, header: &Header) {
        self.guest_capacity = header.buf_alloc.get();
        // A packet may be overtaken by a later one, and the guest may lie: a count that goes back,
        // or beyond what we have sent, tells us nothing.
        let progress = header.fwd_cnt.get().wrapping_sub(self.guest_forwarded);
        if progress <= self.in_flight() {
            self.guest_forwarded = header.fwd_cnt.get();
        }
    }

    fn in_flight(&self) -> u32 {
        self.sent.wrapping_sub(self.guest_forwarded)
    }

    /// Bytes that we may send.
    pub(super) fn room(&self) -> u32 {
        self.guest_capacity.saturating_sub(self.in_flight())
    }

    /// So many bytes were sent, at most [`Credit::room`].
    pub(super) fn sent(&mut self, bytes: u32) {
        self.sent = self.sent.wrapping_add(bytes);
    }

    /// The guest has sent so many bytes.
    pub(super) fn received(&mut self, bytes: u32) -> Result<(), Exceeded> {
        let held = self.held.checked_add(bytes).ok_or(Exceeded)?;
        if held > self.capacity {
            return Err(Exceeded);
        }
        self.held = held;
        Ok(())
    }

    /// So many of the bytes received have been passed on.
    pub(super) fn forwarded(&mut self, bytes: u32) {
        self.held = self.held.saturating_sub(bytes);
        self.forwarded = self.forwarded.wrapping_add(bytes);
    }

    /// Writes what the guest must know into a packet, with which it knows.
    pub(super) fn tell(&mut self, header: &mut Header) {
        header.buf_alloc = self.capacity.into();
        header.fwd_cnt = self.forwarded.into();
        self.told = self.forwarded;
    }

    /// Whether the guest should be told of its credit now: not so often that it costs, and not so
    /// late that it stands still.
    pub(super) fn must_tell(&self) -> bool {
        let untold = self.forwarded.wrapping_sub(self.told);
        // What the guest thinks we hold.
        let assumed = self.held.saturating_add(untold);
        untold > 0 && assumed > self.capacity / 2
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CAPACITY: u32 = 1000;

    fn said(buf_alloc: u32, fwd_cnt: u32) -> Header {
        Header { buf_alloc: buf_alloc.into(), fwd_cnt: fwd_cnt.into(), ..Header::default() }
    }

    #[test]
    fn nothing_is_sent_without_credit() {
        let mut credit = Credit::new(CAPACITY);
        assert_eq!(credit.room(), 0);
        credit.guest_says(&said(100, 0));
        assert_eq!(credit.room(), 100);
        credit.sent(60);
        assert_eq!(credit.room(), 40);
        // Passed on more than it got, then less than before: lies and late packets.
        credit.guest_says(&said(100, 61));
        assert_eq!(credit.room(), 40);
        credit.guest_says(&said(100, 50));
        credit.guest_says(&said(100, 49));
        assert_eq!(credit.room(), 90);
        // A smaller buffer than what is under way.
        credit.guest_says(&said(5, 50));
        assert_eq!(credit.room(), 0);
    }

    #[test]
    fn the_guest_is_held_to_its_credit() {
        let mut credit = Credit::new(CAPACITY);
        assert_eq!(credit.received(CAPACITY), Ok(()));
        assert_eq!(credit.received(1), Err(Exceeded));
        assert_eq!(credit.received(u32::MAX), Err(Exceeded));
        assert!(!credit.must_tell());
        credit.forwarded(1);
        assert!(credit.must_tell());
        let mut header = Header::default();
        credit.tell(&mut header);
        assert_eq!((header.buf_alloc.get(), header.fwd_cnt.get()), (CAPACITY, 1));
        assert!(!credit.must_tell());
        assert_eq!(credit.received(1), Ok(()));
    }

    proptest! {
        /// Two honest sides never exceed each other's buffers, never stand still, and counters
        /// that wrap change nothing.
        #[test]
        fn honest_sides_go_on_for_ever(
            start in prop_oneof![Just(0), u32::MAX - 3000..=u32::MAX],
            steps in prop::collection::vec((1_u32..700, 1_u32..700), 1..200),
        ) {
            let mut ours = Credit::new(CAPACITY);
            (ours.forwarded, ours.told) = (start, start);
            let mut guest = Credit::new(CAPACITY);
            (guest.sent, guest.guest_forwarded) = (start, start);
            let mut header = Header::default();
            ours.tell(&mut header);
            guest.guest_says(&header);
            let mut held = 0;
            for (send, take) in steps {
                let send = send.min(guest.room());
                guest.sent(send);
                prop_assert_eq!(ours.received(send), Ok(()));
                held += send;
                let take = take.min(held);
                ours.forwarded(take);
                held -= take;
                if ours.must_tell() {
                    ours.tell(&mut header);
                    guest.guest_says(&header);
                }
                prop_assert!(guest.room() <= CAPACITY - held);
                // Full in the guest's eyes only if it is nearly so.
                prop_assert!(guest.room() > 0 || held > 0);
            }
        }
    }
}
