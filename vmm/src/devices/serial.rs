//! A serial port (8250 family).

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};

use super::{Device, IrqLine, Outcome, PanicWatch};

/// Input that is kept for a guest that does not read, in bytes.
const INPUT_CAPACITY: usize = 64 << 10;

// Bits of the interrupt enable register and their interrupts in the identification register.
const INTERRUPTS: [(u8, u8); 2] = [(1, 4), (2, 2)];

/// The UART's word that an interrupt has begun.
#[derive(Clone, Default)]
struct Begun(Arc<AtomicBool>);

impl Trigger for Begun {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        self.0.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// One port: what the guest sends goes to a writer, input is kept until the guest reads it.
pub struct SerialPort {
    inner: Mutex<Inner>,
    watch: Option<Arc<PanicWatch>>,
}

/// Output that is read along.
struct Watched {
    watch: Arc<PanicWatch>,
    out: Box<dyn Write + Send>,
}

impl Write for Watched {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.watch.feed(bytes);
        self.out.write_all(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

struct Inner {
    uart: Serial<Begun, NoEvents, Box<dyn Write + Send>>,
    begun: Begun,
    line: Arc<dyn IrqLine>,
    /// The line is asserted.
    asserted: bool,
    /// Input that is not in the UART's FIFO yet.
    input: VecDeque<u8>,
}

impl SerialPort {
    /// Number of its registers, a byte each.
    pub const LENGTH: u64 = 8;

    /// A port whose output goes to `out`, and first to `watch` if it is a console.
    #[must_use]
    pub fn new(
        irq: Arc<dyn IrqLine>,
        out: Box<dyn Write + Send>,
        watch: Option<Arc<PanicWatch>>,
    ) -> SerialPort {
        let out: Box<dyn Write + Send> = match &watch {
            Some(watch) => Box::new(Watched { watch: Arc::clone(watch), out }),
            None => out,
        };
        let begun = Begun::default();
        let uart = Serial::new(begun.clone(), out);
        let inner = Inner { uart, begun, line: irq, asserted: false, input: VecDeque::new() };
        SerialPort { inner: Mutex::new(inner), watch }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest sends bytes by another way than the registers.
    pub fn print(&self, bytes: &[u8]) -> Outcome {
        // Only the writer can fail, and then there is nobody to tell.
        let _ = self.lock().uart.writer_mut().write_all(bytes);
        self.outcome()
    }

    fn outcome(&self) -> Outcome {
        let ended = self.watch.as_ref().is_some_and(|watch| watch.ended());
        if ended { Outcome::Panicked } else { Outcome::Continue }
    }

    /// Sends bytes to the guest; returns how many are kept for it or in its FIFO already. None
    /// are while the port is in use: whoever is in there may wait for a sink that is stuck.
    pub fn push(&self, bytes: &[u8]) -> usize {
        let mut inner = match self.inner.try_lock() {
            Ok(inner) => inner,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return 0,
        };
        let taken = bytes.len().min(INPUT_CAPACITY - inner.input.len());
        inner.input.extend(&bytes[..taken]);
        inner.refill();
        inner.settle();
        taken
    }
}

impl Inner {
    /// Brings the line to what the registers say. A line that stays asserted is asserted again for
    /// an interrupt that has begun, for the sake of edges.
    fn settle(&mut self) {
        let begun = self.begun.0.swap(false, Ordering::Relaxed);
        let state = self.uart.state();
        let interrupts = |(enable, identification): &(u8, u8)| {
            state.interrupt_enable & enable != 0
                && state.interrupt_identification & identification != 0
        };
        let was = std::mem::replace(&mut self.asserted, INTERRUPTS.iter().any(interrupts));
        match (was, self.asserted) {
            (was, true) if begun || !was => self.line.assert(),
            (true, false) => self.line.deassert(),
            _ => {}
        }
    }

    /// Moves input to the FIFO as far as it fits, with an interrupt if the guest wants any.
    fn refill(&mut self) {
        let count = self.uart.fifo_capacity().min(self.input.len());
        if count == 0 {
            return;
        }
        let bytes: Vec<u8> = self.input.iter().take(count).copied().collect();
        // In loopback mode nothing is taken.
        let taken = self.uart.enqueue_raw_bytes(&bytes).unwrap_or(0);
        self.input.drain(..taken);
    }
}

impl Device for SerialPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let Ok(offset) = u8::try_from(offset) else { return };
        let mut inner = self.lock();
        // More than one byte is a string instruction: all of them from one register.
        for byte in data {
            *byte = inner.uart.read(offset);
            if offset == 0 {
                inner.refill();
            }
        }
        inner.settle();
    }

    fn write(&self, offset: u64, data: &[u8]) -> Outcome {
        let Ok(offset) = u8::try_from(offset) else { return Outcome::Continue };
        let mut inner = self.lock();
        for &byte in data {
            // Only the writer can fail, and then there is nobody to tell.
            let _ = inner.uart.write(offset, byte);
        }
        // The end of loopback mode may let input in.
        inner.refill();
        inner.settle();
        drop(inner);
        self.outcome()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Counter(AtomicUsize);

    impl IrqLine for Counter {
        fn assert(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn deassert(&self) {}
    }

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn port() -> (SerialPort, Arc<Counter>, Sink) {
        let (irq, sink) = (Arc::new(Counter::default()), Sink::default());
        (SerialPort::new(irq.clone(), Box::new(sink.clone()), None), irq, sink)
    }

    fn read(port: &SerialPort, offset: u64) -> u8 {
        let mut data = [0xff];
        port.read(offset, &mut data);
        data[0]
    }

    #[test]
    fn output_goes_out() {
        let (port, _, sink) = port();
        assert_eq!(port.write(0, b"h"), Outcome::Continue);
        assert_eq!(port.write(0, b"ello"), Outcome::Continue);
        assert_eq!(port.print(b" you"), Outcome::Continue);
        assert_eq!(*sink.0.lock().unwrap(), b"hello you");
    }

    #[test]
    fn more_input_than_the_fifo_holds_comes_in_order() {
        let (port, irq, _) = port();
        port.write(1, &[1]); // interrupt on received data
        let bytes: Vec<u8> = (0..1000_u32).map(|i| (i % 251) as u8).collect();
        assert_eq!(port.push(&bytes), 1000);
        assert!(irq.0.load(Ordering::Relaxed) > 0);
        let mut seen = Vec::new();
        while read(&port, 5) & 1 != 0 {
            seen.push(read(&port, 0));
        }
        assert_eq!(seen, bytes);
    }

    #[derive(Default)]
    struct Level(AtomicBool);

    impl IrqLine for Level {
        fn assert(&self) {
            self.0.store(true, Ordering::Relaxed);
        }
        fn deassert(&self) {
            self.0.store(false, Ordering::Relaxed);
        }
    }

    // A level-triggered line that stays high is an interrupt without end, one that stays low a
    // console without input.
    #[test]
    fn the_line_follows_the_registers() {
        let line = Arc::new(Level::default());
        let port = SerialPort::new(line.clone(), Box::new(io::sink()), None);
        let high = || line.0.load(Ordering::Relaxed);
        port.push(b"x");
        assert!(!high(), "nothing is enabled");
        port.write(1, &[1]);
        assert!(high());
        // As the console does while it writes.
        port.write(1, &[0]);
        assert!(!high());
        port.write(1, &[1]);
        assert!(high());
        assert_eq!((read(&port, 2) & 0xf, high()), (4, false));
        assert_eq!((read(&port, 0), high()), (b'x', false));
        port.write(1, &[2]);
        assert!(high(), "there is always room for output");
        assert_eq!((read(&port, 2) & 0xf, high()), (2, false));
        port.write(0, b"y");
        assert!(high());
    }

    #[test]
    fn input_is_bounded() {
        let (port, _, _) = port();
        let bytes = vec![1; INPUT_CAPACITY * 2];
        assert!(port.push(&bytes) <= INPUT_CAPACITY);
        port.push(&bytes);
        assert_eq!(port.push(&bytes), 0);
    }

    #[test]
    fn loopback_keeps_input_for_later() {
        let (port, _, _) = port();
        port.write(4, &[0x10]);
        assert_eq!(port.push(b"x"), 1);
        assert_eq!(read(&port, 5) & 1, 0);
        port.write(4, &[0]);
        assert_eq!(read(&port, 0), b'x');
    }

    #[test]
    fn a_halted_kernel_is_told() {
        let watch = Arc::new(PanicWatch::default());
        let port = SerialPort::new(Arc::new(Counter::default()), Box::new(io::sink()), Some(watch));
        for line in ["Kernel panic - not syncing: x\n", "---[ end Kernel panic - not syncing: x ]"]
        {
            assert_eq!(port.write(0, line.as_bytes()), Outcome::Continue);
        }
        assert_eq!(port.write(0, b"\n"), Outcome::Panicked);
        assert_eq!(port.print(b"\n"), Outcome::Panicked);
    }

    #[test]
    fn odd_registers_do_no_harm() {
        let (port, _, _) = port();
        for offset in [7, 8, 255, 256, u64::MAX] {
            port.write(offset, &[0xff; 16]);
            port.read(offset, &mut [0; 16]);
        }
        port.read(0, &mut []);
        port.write(0, &[]);
    }
}
