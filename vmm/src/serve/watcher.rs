//! Consumers of a running trace inside vmtrace itself, which answer commands about it.
//!
//! Like other consumers a watcher has a queue, and it runs in their thread. Neither the relay nor
//! the controller ever waits for it. If it is too slow, it loses records and is told so.

use super::queue::{Popped, Queue};
use super::server::{Answer, Reply};
use super::unsent::Unsent;
use crate::events::{Bell, EventOps, EventSet, Events, MutEventSubscriber, Timer, watch};
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How many bytes it may be behind before it loses records.
const QUEUE: usize = 64 << 20;
/// Answers that may be waited for at a time.
const MOST: usize = 16;
/// How long an answer waits for what had happened when it was asked for.
const BEHIND: Duration = Duration::from_secs(5);
/// Chunks before it is the turn of others.
const TURN: usize = 4;

const TOO_MANY: &str = "too many commands at once; try again later";
const GONE: &str = "the stream is no longer evaluated: the trace has ended, or came too fast; \
                    stop, and start again if it goes on";

/// What makes something of a stream.
pub trait Look: Send {
    /// The next bytes of the stream: whole frames.
    fn push(&mut self, bytes: &[u8]);

    /// Up to this time of the guest's clock, in ticks, all was seen.
    fn seen(&self) -> u64;

    /// What there is to tell, in one line. `behind`: not all that had happened was seen.
    fn tell(&mut self, json: bool, behind: bool) -> Answer;
}

/// One that wants to know.
struct Ask {
    /// What had happened then, in ticks of the guest's clock, is to be in the answer.
    until: u64,
    deadline: Instant,
    json: bool,
    /// Nobody asks after this.
    last: bool,
    reply: Reply,
}

#[derive(Default)]
struct Inbox {
    asks: Vec<Ask>,
    /// Nobody wants to know any more.
    left: bool,
    /// Nobody looks any more.
    gone: bool,
}

/// For those who want to know. Dropping this ends the looking.
pub struct Watch {
    inbox: Arc<Mutex<Inbox>>,
    bell: Bell,
}

/// What is to be added to a [`Hub`](super::Hub).
pub struct Watched(Watcher);

impl Watch {
    /// Of the stream of a machine with so many vCPUs.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new(look: Box<dyn Look>, vcpus: usize) -> io::Result<(Self, Watched)> {
        let queue = Arc::new(Queue::new(QUEUE, vcpus)?);
        let inbox = Arc::<Mutex<Inbox>>::default();
        let bell = queue.bell().clone();
        let watcher = Watcher {
            queue,
            inbox: Arc::clone(&inbox),
            look: Some(look),
            asks: Vec::new(),
            answers: HashMap::new(),
            next: FIRST_ANSWER,
            timer: Timer::new()?,
            ended: false,
        };
        Ok((Self { inbox, bell }, Watched(watcher)))
    }

    /// Has somebody told what there is up to then (in ticks of the guest's clock), soon.
    pub fn ask(&self, until: u64, json: bool, reply: Reply) {
        self.put(until, json, false, reply);
    }

    /// The same, and nobody asks after this.
    pub fn ask_last(self, until: u64, json: bool, reply: Reply) {
        self.put(until, json, true, reply);
    }

    fn put(&self, until: u64, json: bool, last: bool, reply: Reply) {
        let deadline = Instant::now() + BEHIND;
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        let refusal = match inbox.gone {
            true => Some(GONE),
            false if inbox.asks.len() >= MOST && !last => Some(TOO_MANY),
            false => None,
        };
        if let Some(refusal) = refusal {
            drop(inbox);
            return reply.send(Err(refusal.into()));
        }
        inbox.asks.push(Ask { until, deadline, json, last, reply });
        drop(inbox);
        self.bell.ring();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).left = true;
        self.bell.ring();
    }
}

impl Watched {
    /// The subscriber of the consumers' event loop, and its queue, which is given what a consumer
    /// joins with.
    pub(super) fn subscriber(
        self,
        first: Vec<u8>,
    ) -> (Box<dyn MutEventSubscriber + Send>, Arc<Queue>) {
        let queue = Arc::clone(&self.0.queue);
        queue.push_first(first.into());
        (Box::new(self.0), queue)
    }
}

const BELL: u32 = 0;
const TIMER: u32 = 1;
const FIRST_ANSWER: u32 = 2;

struct Watcher {
    queue: Arc<Queue>,
    inbox: Arc<Mutex<Inbox>>,
    /// None once nobody asks any more.
    look: Option<Box<dyn Look>>,
    asks: Vec<Ask>,
    answers: HashMap<u32, Unsent>,
    next: u32,
    timer: Timer,
    /// Nothing follows in the stream.
    ended: bool,
}

impl Watcher {
    fn take_asks(&mut self) {
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        let (asks, left) = (std::mem::take(&mut inbox.asks), inbox.left);
        drop(inbox);
        for ask in asks {
            if self.asks.len() < MOST || ask.last {
                self.asks.push(ask);
            } else {
                ask.reply.send(Err(TOO_MANY.into()));
            }
        }
        if left && self.asks.is_empty() {
            self.look = None;
        }
    }

    /// Whether there may be more at once.
    fn look(&mut self) -> bool {
        for _ in 0..TURN {
            match self.queue.pop() {
                Popped::Wait => return false,
                Popped::Chunk(chunk) => {
                    if let Some(look) = &mut self.look {
                        look.push(&chunk);
                    }
                    // The end of the stream waits for those who go on.
                    self.queue.note_sent(chunk.len());
                }
                Popped::End => {
                    self.ended = true;
                    return false;
                }
            }
        }
        true
    }

    /// Answers those whose time has come.
    fn answer(&mut self, ops: &mut EventOps<'_>) {
        let (now, ended) = (Instant::now(), self.ended);
        let Some(look) = &mut self.look else { return };
        let seen = look.seen();
        let is_due = |ask: &Ask| ended || ask.until <= seen || ask.deadline <= now;
        let (due, rest): (Vec<_>, _) = self.asks.drain(..).partition(is_due);
        self.asks = rest;
        let mut last = false;
        for Ask { until, json, last: is_last, reply, .. } in due {
            last |= is_last;
            let answer = look.tell(json, until > seen && !ended);
            let Some((stream, text)) = reply.into_parts(answer) else { continue };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            let mut unsent = Unsent::new(stream, text);
            if unsent.send() {
                continue;
            }
            let id = self.next;
            self.next = id.wrapping_add(1).max(FIRST_ANSWER);
            let set = EventSet::OUT | EventSet::EDGE_TRIGGERED;
            if self.answers.len() < MOST
                && !self.answers.contains_key(&id)
                && ops.add(Events::with_data(unsent.stream(), id, set)).is_ok()
            {
                // What it has taken since is not an edge any more.
                if unsent.send() {
                    let _ = ops.remove(Events::empty(unsent.stream()));
                } else {
                    self.answers.insert(id, unsent);
                }
            }
        }
        if last {
            self.look = None;
            self.asks.clear();
        }
    }

    fn send(&mut self, ops: &mut EventOps<'_>, id: u32, gone: bool) {
        if self.answers.get_mut(&id).is_some_and(|unsent| unsent.send() || gone)
            && let Some(unsent) = self.answers.remove(&id)
        {
            let _ = ops.remove(Events::empty(unsent.stream()));
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        inbox.gone = true;
        let asks = std::mem::take(&mut inbox.asks);
        drop(inbox);
        for ask in asks.into_iter().chain(self.asks.drain(..)) {
            ask.reply.send(Err(GONE.into()));
        }
    }
}

impl MutEventSubscriber for Watcher {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let id = events.data();
        if id >= FIRST_ANSWER {
            let gone = events.event_set().intersects(EventSet::HANG_UP | EventSet::ERROR);
            self.send(ops, id, gone);
        }
        if self.look() {
            self.queue.bell().ring();
        }
        // Whoever has asked before the end of the stream is known when that is seen.
        self.take_asks();
        self.answer(ops);
        self.timer.set(self.asks.iter().map(|ask| ask.deadline).min());
        // Not before: the hub then takes this out of the loop.
        let over = self.look.is_none() || self.ended && self.asks.is_empty();
        if over && self.answers.is_empty() {
            self.queue.leave();
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(ops, self.queue.bell().events(BELL));
        watch(ops, self.timer.events(TIMER));
        self.queue.bell().ring();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Hub, Resolve};
    use super::*;
    use crate::stream::{Frame, Reader, Writer, sample};
    use std::io::{ErrorKind, Read};
    use std::os::unix::net::UnixStream;

    /// Counts records, and has much to tell of it.
    #[derive(Default)]
    struct Counts {
        bytes: Vec<u8>,
    }

    impl Counts {
        fn all(&self) -> (u64, u64) {
            let (mut records, mut seen) = (0, 0);
            let mut reader = Reader::new(&*self.bytes).unwrap();
            while let Ok(Some(frame)) = reader.next_frame() {
                match frame {
                    Frame::Records(batch) => records += u64::from(batch.count),
                    Frame::Watermark(ticks) => seen = ticks,
                    _ => {}
                }
            }
            (records, seen)
        }
    }

    impl Look for Counts {
        fn push(&mut self, bytes: &[u8]) {
            self.bytes.extend_from_slice(bytes);
        }

        fn seen(&self) -> u64 {
            if self.bytes.is_empty() { 0 } else { self.all().1 }
        }

        fn tell(&mut self, json: bool, behind: bool) -> Answer {
            let rest = if json { "x".repeat(1 << 20) } else { String::new() };
            Ok(format!("{} {behind} {rest}", self.all().0))
        }
    }

    fn started() -> (Writer<Hub>, Watch) {
        let resolve: Resolve = Arc::new(|_| std::collections::HashSet::new());
        let hub = Hub::new(Box::new(io::sink()), 2, resolve).unwrap();
        let mut writer = Writer::new(hub, &sample::header()).unwrap();
        records(&mut writer, 5);
        let (watch, watched) = Watch::new(Box::<Counts>::default(), 2).unwrap();
        let first = writer.join().unwrap();
        writer.get_mut().watch(first, watched).unwrap();
        (writer, watch)
    }

    fn records(writer: &mut Writer<Hub>, count: u64) {
        let all = (0..count).map(|at| sample::entry(at, sample::READ, sample::READ + 9, 7));
        let mut batch = crate::stream::RecordBuffer::new();
        all.for_each(|record| batch.push(record));
        writer.records(0, &batch).unwrap();
        writer.flush().unwrap();
    }

    fn waits() -> (Reply, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Reply::to(ours), theirs)
    }

    fn heard(mut stream: UnixStream) -> String {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    // An answer that comes before what had happened when it was asked for would leave out what the user
    // has just seen; and one that is long must not wait in anybody's way.
    #[test]
    fn answers_come_when_all_has_been_seen_and_are_whole() {
        let (mut writer, watch) = started();
        let (reply, early) = waits();
        watch.ask(1000, false, reply);
        let (reply, long) = waits();
        watch.ask(1000, true, reply);
        records(&mut writer, 7);
        writer.watermark(999).unwrap();
        early.set_nonblocking(true).unwrap();
        assert_eq!((&early).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        early.set_nonblocking(false).unwrap();
        records(&mut writer, 2);
        writer.watermark(1000).unwrap();
        assert_eq!(heard(early), "OK 9 false \n");
        assert_eq!(writer.get_mut().consumers(), 0, "it does not count as one");
        // The relay goes on while nobody reads that.
        records(&mut writer, 1);
        let (reply, last) = waits();
        watch.ask_last(1000, false, reply);
        assert_eq!(heard(last), "OK 9 false \n".replace('9', "10"));
        let long = heard(long);
        assert_eq!((long.len(), &long[..12]), ("OK 9 false \n".len() + (1 << 20), "OK 9 false x"));
    }

    #[test]
    fn whoever_waits_is_told_that_nobody_looks_any_more() {
        let (mut writer, watch) = started();
        let (reply, late) = waits();
        watch.ask(u64::MAX, false, reply);
        let _ = writer.get_mut().finish(|_| Some(Duration::ZERO));
        // The end has been seen: that is all there is.
        assert_eq!(heard(late), "OK 0 false \n");
        let (reply, gone) = waits();
        drop(writer);
        watch.ask(0, false, reply);
        assert!(heard(gone).starts_with("ERR the stream is no longer evaluated"));
    }

    // One that nobody asks any more costs nothing.
    #[test]
    fn it_ends_with_the_last_who_wants_to_know() {
        let (mut writer, watch) = started();
        drop(watch);
        let begin = Instant::now();
        while writer.get_mut().watchers() > 0 {
            assert!(begin.elapsed() < Duration::from_secs(60));
            records(&mut writer, 1);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
