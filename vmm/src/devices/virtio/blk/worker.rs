//! Executes requests, in a thread for each disk.
//!
//! It works in steps, each under the lock: to take a request, to move a piece of its data, to
//! answer it. It touches guest memory only inside the gate, and the file only outside, so a pause
//! never waits for a disk. A reset waits for at most one step.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtio_bindings::virtio_blk as blk;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

use super::disk::{Disk, Failed};
use super::request::{Action, Offer, Range, Request, Status};
use super::{FEATURES_DISCARD, FEATURES_FLUSH, FEATURES_ZEROES};
use crate::devices::virtio::{Activation, Broken, Interrupt};
use crate::devices::{Gate, Pass};
use crate::events::{Bell, EventOps, Events, MutEventSubscriber, watch};

/// Bytes moved in a step.
const PIECE: usize = 256 << 10;

const BELL: u32 = 0;

impl From<Failed> for Status {
    fn from(_: Failed) -> Status {
        Status::Error
    }
}

/// What the device and its thread share.
pub(super) struct Shared {
    /// Rung by the guest.
    pub(super) bell: Bell,
    /// Somebody wants the lock for good.
    yields: AtomicBool,
    core: Mutex<Core>,
}

/// Everything that is under the lock.
struct Core {
    disk: Disk,
    /// What the guest is told that it is called.
    serial: [u8; blk::VIRTIO_BLK_ID_BYTES as usize],
    /// While there is a driver.
    driver: Option<Driver>,
    /// Between file and guest.
    piece: Vec<u8>,
}

struct Driver {
    memory: GuestMemoryMmap,
    queue: Queue,
    interrupt: Arc<Interrupt>,
    gate: Arc<Gate>,
    offer: Offer,
    /// Nothing was said of a cache: each write is on the disk when it is answered.
    write_through: bool,
    work: Option<Work>,
}

/// A request that is being executed.
struct Work {
    request: Request,
    state: State,
}

enum State {
    Do(Action),
    /// So much was read and is to be moved to the guest, then it goes on there.
    Move(usize, u64),
    /// So much came from the guest and is to be written there.
    Store(usize, u64),
    Answer(Status),
}

/// What comes next.
enum Next {
    Again,
    /// When the bell rings.
    Wait,
}

impl Shared {
    pub(super) fn new(disk: Disk, serial: &str) -> std::io::Result<Shared> {
        let mut bytes = [0; blk::VIRTIO_BLK_ID_BYTES as usize];
        for (to, from) in bytes.iter_mut().zip(serial.bytes()) {
            *to = from;
        }
        let core = Core { disk, serial: bytes, driver: None, piece: vec![0; PIECE] };
        let yields = AtomicBool::new(false);
        Ok(Shared { bell: Bell::new()?, yields, core: Mutex::new(core) })
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn activate(&self, active: Activation) -> Result<(), Broken> {
        let mut queues = active.queues.into_iter();
        let queue = queues.next().flatten().ok_or(Broken)?;
        let mut core = self.lock();
        let offer = Offer {
            bytes: core.disk.bytes(),
            writable: core.disk.writable(),
            discards: active.features & FEATURES_DISCARD != 0,
            zeroes: active.features & FEATURES_ZEROES != 0,
        };
        core.driver = Some(Driver {
            memory: active.memory,
            queue,
            interrupt: active.interrupt,
            gate: active.gate,
            offer,
            write_through: active.features & FEATURES_FLUSH == 0,
            work: None,
        });
        drop(core);
        // There may be requests already.
        self.bell.ring();
        Ok(())
    }

    /// The driver is gone, and nothing that it has asked for happens any more.
    pub(super) fn reset(&self) {
        self.yields.store(true, Ordering::SeqCst);
        self.lock().driver = None;
        self.yields.store(false, Ordering::SeqCst);
    }

    /// The thread has no more to do.
    pub(super) fn end(&self) {
        self.yields.store(true, Ordering::SeqCst);
    }

    /// Executes what there is.
    pub(super) fn serve(&self) {
        loop {
            if self.yields.load(Ordering::SeqCst) {
                // A driver that comes after that rings.
                return;
            }
            let mut core = self.lock();
            match core.step(&self.bell) {
                Ok(Next::Again) => {}
                Ok(Next::Wait) => return,
                Err(Broken) => {
                    if let Some(driver) = core.driver.take() {
                        driver.interrupt.needs_reset();
                    }
                }
            }
        }
    }
}

/// The thread, as a subscriber of its event loop.
pub(super) struct Server(pub(super) Arc<Shared>);

impl MutEventSubscriber for Server {
    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        self.0.serve();
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(ops, self.0.bell.events(BELL));
        // What was there before.
        self.0.bell.ring();
    }
}

impl Core {
    fn step(&mut self, bell: &Bell) -> Result<Next, Broken> {
        let Core { disk, serial, driver, piece } = self;
        let Some(driver) = driver else { return Ok(Next::Wait) };
        let Some(Work { request, state }) = &mut driver.work else { return driver.take(bell) };
        let result = match state {
            State::Do(action) => match action {
                Action::Read(_) | Action::Identify if request.to_guest.length == 0 => {
                    Ok(State::Answer(Status::Ok))
                }
                Action::Read(offset) => {
                    let count = part(piece, request.to_guest.length);
                    let next = *offset + count as u64;
                    disk.read(&mut piece[..count], *offset).map(|()| State::Move(count, next))
                }
                Action::Identify => {
                    // Those of a driver that wants less get less.
                    let count = part(serial, request.to_guest.length);
                    piece[..count].copy_from_slice(&serial[..count]);
                    let Some(_pass) = driver.gate.enter(bell) else { return Ok(Next::Wait) };
                    let moved = request.to_guest.write(&driver.memory, &piece[..count]);
                    Ok(State::Answer(moved.map_or_else(Status::from, |()| Status::Ok)))
                }
                Action::Write(_) if request.from_guest.length == 0 => {
                    let flushed = if driver.write_through { disk.flush() } else { Ok(()) };
                    flushed.map(|()| State::Answer(Status::Ok))
                }
                Action::Write(offset) => {
                    let count = part(piece, request.from_guest.length);
                    let Some(_pass) = driver.gate.enter(bell) else { return Ok(Next::Wait) };
                    match request.from_guest.read(&driver.memory, &mut piece[..count]) {
                        Ok(()) => Ok(State::Store(count, *offset)),
                        Err(error) => Ok(State::Answer(error.into())),
                    }
                }
                Action::Flush => disk.flush().map(|()| State::Answer(Status::Ok)),
                Action::Discard(ranges) | Action::Zero(ranges) if ranges.is_empty() => {
                    let flushed = if driver.write_through { disk.flush() } else { Ok(()) };
                    flushed.map(|()| State::Answer(Status::Ok))
                }
                Action::Discard(ranges) => {
                    let range = ranges.pop_front();
                    let done = range.map_or(Ok(()), |of| disk.discard(of.offset, of.bytes));
                    done.map(|()| State::Do(Action::Discard(std::mem::take(ranges))))
                }
                Action::Zero(ranges) => {
                    let done = zero(disk, ranges, piece);
                    done.map(|()| State::Do(Action::Zero(std::mem::take(ranges))))
                }
            },
            State::Move(count, next) => {
                let Some(_pass) = driver.gate.enter(bell) else { return Ok(Next::Wait) };
                match request.to_guest.write(&driver.memory, &piece[..*count]) {
                    Ok(()) => Ok(State::Do(Action::Read(*next))),
                    Err(error) => Ok(State::Answer(error.into())),
                }
            }
            State::Store(count, offset) => {
                let next = *offset + *count as u64;
                disk.write(&piece[..*count], *offset).map(|()| State::Do(Action::Write(next)))
            }
            State::Answer(status) => {
                let status = *status;
                return driver.answer(status, bell);
            }
        };
        *state = result.unwrap_or_else(|failed| State::Answer(failed.into()));
        Ok(Next::Again)
    }
}

/// How much of `left` fits.
fn part(piece: &[u8], left: u64) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(piece.len())
}

/// Makes the first range zero, or a piece of it.
fn zero(disk: &mut Disk, ranges: &mut VecDeque<Range>, piece: &mut [u8]) -> Result<(), Failed> {
    let Some(range) = ranges.front_mut() else { return Ok(()) };
    if disk.zero(range.offset, range.bytes, range.unmap)? {
        ranges.pop_front();
        return Ok(());
    }
    let count = part(piece, range.bytes);
    piece[..count].fill(0);
    disk.write(&piece[..count], range.offset)?;
    range.offset += count as u64;
    range.bytes -= count as u64;
    if range.bytes == 0 {
        ranges.pop_front();
    }
    Ok(())
}

impl Driver {
    /// Takes the next request.
    fn take(&mut self, bell: &Bell) -> Result<Next, Broken> {
        let Some(_pass) = self.gate.enter(bell) else { return Ok(Next::Wait) };
        self.queue.disable_notification(&self.memory)?;
        let Some(chain) = self.queue.iter(&self.memory)?.next() else {
            // True if something came after all.
            let more = self.queue.enable_notification(&self.memory)?;
            return Ok(if more { Next::Again } else { Next::Wait });
        };
        let mut request = Request::new(chain)?;
        let state = match request.action(&self.memory, self.offer) {
            Ok(action) => State::Do(action),
            Err(status) => State::Answer(status),
        };
        self.work = Some(Work { request, state });
        Ok(Next::Again)
    }

    /// Gives a request back.
    fn answer(&mut self, status: Status, bell: &Bell) -> Result<Next, Broken> {
        let pass: Option<Pass<'_>> = self.gate.enter(bell);
        let (Some(_pass), Some(Work { request, .. })) = (pass, &self.work) else {
            return Ok(Next::Wait);
        };
        let (head, written) = (request.head, request.answer(&self.memory, status)?);
        self.work = None;
        self.queue.add_used(&self.memory, head, written)?;
        if self.queue.needs_notification(&self.memory)? {
            self.interrupt.used_buffers();
        }
        Ok(Next::Again)
    }
}
