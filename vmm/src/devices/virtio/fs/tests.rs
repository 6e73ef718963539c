//! Tests of the device, which play both the guest and the server.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmtrace_share::message::{ANSWER, Answer, MAX, REQUEST, Request, opcode};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::*;
use crate::devices::Gate;
use crate::devices::virtio::Interrupt;
use crate::devices::virtio::test_line::Line;

const SIZE: u16 = 16;
/// A queue's descriptors, available and used ring, each in a page.
const RINGS: u64 = 0x1_0000;
const REQUESTS: u64 = 0x10_0000;
const ANSWERS: u64 = 0x80_0000;
const MEMORY: usize = 16 << 20;

struct Guest {
    device: Fs,
    worker: Worker,
    memory: GuestMemoryMmap,
    gate: Arc<Gate>,
    interrupt: Arc<Interrupt>,
    server: UnixStream,
    offered: [u16; 2],
}

fn rings(queue: usize) -> u64 {
    RINGS + 0x4000 * queue as u64
}

impl Guest {
    fn new() -> Guest {
        let (ours, server) = UnixStream::pair().unwrap();
        server.set_nonblocking(true).unwrap();
        let share = Share { tag: "tag".to_owned(), server: ours };
        let (device, worker) = Fs::with_worker(share).unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        let interrupt = Arc::new(Interrupt::new(Arc::new(Line::default())));
        let gate = Arc::new(Gate::default());
        let mut guest = Guest { device, worker, memory, gate, interrupt, server, offered: [0; 2] };
        guest.start();
        guest
    }

    /// As a driver that has just come.
    fn start(&mut self) {
        let queues = [0, 1].map(|index| {
            let mut queue = Queue::new(SIZE).unwrap();
            let half = |address: u64| Some(u32::try_from(address).unwrap());
            queue.set_desc_table_address(half(rings(index)), Some(0));
            queue.set_avail_ring_address(half(rings(index) + 0x1000), Some(0));
            queue.set_used_ring_address(half(rings(index) + 0x2000), Some(0));
            queue.set_ready(true);
            self.memory.write_slice(&[0; 0x3000], GuestAddress(rings(index))).unwrap();
            Some(queue)
        });
        self.offered = [0; 2];
        let active = Activation {
            memory: self.memory.clone(),
            queues: queues.into(),
            features: 0,
            interrupt: Arc::clone(&self.interrupt),
            gate: Arc::clone(&self.gate),
        };
        self.device.activate(active).unwrap();
    }

    /// Offers a message, with room for an answer, in pieces.
    fn offer(&mut self, queue: usize, message: &[u8], room: u32) {
        let number = self.offered[queue];
        let place = u64::from(number) * 0x10_0000 + 0x8000 * queue as u64;
        self.memory.write_slice(message, GuestAddress(REQUESTS + place)).unwrap();
        let first = u32::try_from(message.len()).unwrap() / 2;
        let rest = u32::try_from(message.len()).unwrap() - first;
        let pieces = [
            (REQUESTS + place, first, 0),
            (REQUESTS + place + u64::from(first), rest, 0),
            (ANSWERS + place, room, 2_u16),
        ];
        let last = pieces.len() - 1 - usize::from(room == 0);
        for (index, (address, length, flags)) in pieces.into_iter().enumerate().take(last + 1) {
            let at = number * 3 + u16::try_from(index).unwrap();
            let flags = flags | u16::from(index < last);
            let descriptor = [
                &address.to_le_bytes()[..],
                &length.to_le_bytes(),
                &flags.to_le_bytes(),
                &(at + 1).to_le_bytes(),
            ]
            .concat();
            let table = GuestAddress(rings(queue) + u64::from(at) * 16);
            self.memory.write_slice(&descriptor, table).unwrap();
        }
        let available = rings(queue) + 0x1000;
        let entry = GuestAddress(available + 4 + u64::from(number) * 2);
        self.memory.write_obj((number * 3).to_le(), entry).unwrap();
        self.offered[queue] += 1;
        self.memory.write_obj(self.offered[queue].to_le(), GuestAddress(available + 2)).unwrap();
        self.worker.turn();
    }

    /// The lengths that the used ring tells.
    fn used(&self, queue: usize) -> Vec<u32> {
        let ring = rings(queue) + 0x2000;
        let count: u16 = self.memory.read_obj(GuestAddress(ring + 2)).unwrap();
        let length = |index| GuestAddress(ring + 4 + u64::from(index) * 8 + 4);
        (0..count).map(|index| self.memory.read_obj(length(index)).unwrap()).collect()
    }

    fn answer(&self, number: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let at = GuestAddress(ANSWERS + number * 0x10_0000 + 0x8000);
        self.memory.read_slice(&mut bytes, at).unwrap();
        bytes
    }

    /// What the server hears.
    fn heard(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut piece = [0; 4096];
        loop {
            self.worker.turn();
            match self.server.read(&mut piece) {
                Ok(0) => return bytes,
                Ok(count) => bytes.extend(&piece[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return bytes,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn say(&mut self, unique: u64, body: &[u8]) {
        let mut header = Answer::bare(unique, 0);
        header.length = u32::try_from(ANSWER + body.len()).unwrap().into();
        self.server.write_all(&[header.as_bytes(), body].concat()).unwrap();
        self.worker.turn();
    }
}

fn message(opcode: u32, unique: u64, body: &[u8]) -> Vec<u8> {
    let mut header = Request::new_zeroed();
    header.length = u32::try_from(REQUEST + body.len()).unwrap().into();
    header.opcode = opcode.into();
    header.unique = unique.into();
    [header.as_bytes(), body].concat()
}

fn header(bytes: &[u8]) -> Request {
    Request::read_from_prefix(bytes).unwrap().0
}

fn outcome(bytes: &[u8]) -> (u64, i32) {
    let (answer, _) = Answer::read_from_prefix(bytes).unwrap();
    (answer.unique.get(), answer.error.get())
}

#[test]
fn the_driver_learns_the_tag() {
    let guest = Guest::new();
    let mut config = [0xff; 44];
    guest.device.read_config(0, &mut config);
    assert_eq!(config[..4], *b"tag\0");
    assert_eq!(config[36..40], 1_u32.to_le_bytes(), "queues of requests");
    guest.device.read_config(u64::MAX, &mut config);
}

// Two that a guest calls by the same number are two, and answers may come in any order.
#[test]
fn answers_find_their_requests() {
    let mut guest = Guest::new();
    guest.offer(1, &message(opcode::LOOKUP, 7, b"one\0"), 64);
    guest.offer(1, &message(opcode::LOOKUP, 7, b"two\0"), 64);
    let heard = guest.heard();
    let (first, second) = heard.split_at(REQUEST + 4);
    assert_eq!((&first[REQUEST..], &second[REQUEST..]), (&b"one\0"[..], &b"two\0"[..]));
    let (one, two) = (header(first).unique.get(), header(second).unique.get());
    assert_ne!(one, two);
    guest.say(two, b"second");
    guest.say(one, b"first");
    // Nobody has asked.
    guest.say(12345, b"?");
    assert_eq!(guest.used(1), [22, 21]);
    assert_eq!(guest.answer(0, 21)[ANSWER..], *b"first");
    assert_eq!(guest.answer(1, 22)[ANSWER..], *b"second");
    assert_eq!(outcome(&guest.answer(1, ANSWER)), (7, 0));
}

#[test]
fn what_nobody_answers_is_given_back_at_once() {
    let mut guest = Guest::new();
    guest.offer(0, &message(opcode::FORGET, 1, &[0; 8]), 0);
    assert_eq!(guest.used(0), [0]);
    assert_eq!(header(&guest.heard()).opcode.get(), opcode::FORGET);
}

#[test]
fn what_is_no_message_does_not_reach_the_server() {
    let mut guest = Guest::new();
    let good = message(opcode::LOOKUP, 9, b"x\0");
    let mut long = good.clone();
    long[0] += 1;
    for (bad, length) in [(&good[..30], 16), (&good[..41], 16), (&long[..], 16)] {
        guest.offer(1, bad, 64);
        assert_eq!(guest.used(1).last(), Some(&length));
        let number = guest.used(1).len() as u64 - 1;
        assert_eq!(outcome(&guest.answer(number, ANSWER)).1, -libc::EINVAL);
    }
    // No room for an error, either.
    guest.offer(1, &good[..30], 8);
    assert_eq!(guest.used(1).last(), Some(&0));
    assert_eq!(guest.heard(), b"");
    assert!(!guest.interrupt.is_broken());
}

// A server that has been taken over writes where the guest has room for answers, and nowhere else.
#[test]
fn an_answer_that_does_not_fit_is_an_error() {
    let mut guest = Guest::new();
    guest.offer(1, &message(opcode::READ, 3, &[0; 40]), 32);
    let unique = header(&guest.heard()).unique.get();
    guest.say(unique, &[1; 100]);
    assert_eq!(guest.used(1), [16]);
    assert_eq!(outcome(&guest.answer(0, ANSWER)), (3, -libc::EIO));
    // What cannot be an answer at all ends the share.
    guest.server.write_all(&[0xff; ANSWER]).unwrap();
    guest.offer(1, &message(opcode::READ, 4, &[0; 40]), 32);
    assert_eq!(outcome(&guest.answer(1, ANSWER)), (4, -libc::EIO));
}

#[test]
fn without_a_server_there_are_errors_and_no_waiting() {
    let mut guest = Guest::new();
    guest.offer(1, &message(opcode::LOOKUP, 1, b"x\0"), 64);
    let (other, _) = UnixStream::pair().unwrap();
    drop(std::mem::replace(&mut guest.server, other));
    guest.worker.turn();
    assert_eq!(outcome(&guest.answer(0, ANSWER)), (1, -libc::EIO));
    guest.offer(1, &message(opcode::LOOKUP, 2, b"x\0"), 64);
    assert_eq!(outcome(&guest.answer(1, ANSWER)), (2, -libc::EIO));
    guest.offer(0, &message(opcode::FORGET, 3, &[0; 8]), 0);
    assert_eq!((guest.used(1), guest.used(0)), (vec![16, 16], vec![0]));
}

#[test]
fn nothing_is_touched_during_a_pause() {
    let mut guest = Guest::new();
    guest.offer(1, &message(opcode::LOOKUP, 1, b"x\0"), 64);
    let unique = header(&guest.heard()).unique.get();
    guest.gate.close();
    guest.say(unique, b"answer");
    guest.offer(1, &message(opcode::LOOKUP, 2, b"y\0"), 64);
    assert!(guest.used(1).is_empty());
    assert_eq!(guest.heard(), b"");
    guest.gate.open();
    guest.worker.turn();
    assert_eq!(guest.used(1), [22]);
    assert_eq!(header(&guest.heard()).opcode.get(), opcode::LOOKUP);
}

// A guest that boots again must not get what the one before has asked for, nor its open files.
#[test]
fn a_reset_forgets_everything() {
    let mut guest = Guest::new();
    guest.offer(1, &message(opcode::INIT, 1, &[0; 16]), 64);
    let init = header(&guest.heard()).unique.get();
    guest.say(init, &[0; 8]);
    guest.offer(1, &message(opcode::LOOKUP, 2, b"x\0"), 64);
    let asked = header(&guest.heard()).unique.get();
    guest.device.reset();
    assert_eq!(header(&guest.heard()).opcode.get(), opcode::DESTROY);
    guest.start();
    guest.say(0, &[]);
    guest.say(asked, b"late");
    assert!(guest.used(1).is_empty());
    guest.offer(1, &message(opcode::INIT, 1, &[0; 16]), 64);
    assert_eq!(header(&guest.heard()).opcode.get(), opcode::INIT);
    guest.device.reset();
    // Once is enough.
    guest.device.reset();
    assert_eq!(guest.heard().len(), REQUEST);
}

#[test]
fn the_longest_messages_pass() {
    let mut guest = Guest::new();
    let body: Vec<u8> = (0..MAX - REQUEST).map(|at| at.to_le_bytes()[0]).collect();
    guest.offer(1, &message(opcode::WRITE, 1, &body), 64);
    let heard = guest.heard();
    assert!(heard.len() == MAX && heard[REQUEST..] == body);
}
