//! The emulated host: a QEMU in which vmtrace finds a real `/dev/kvm` and runs jobs.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use serde_json::json;

use super::arch::{HostArch, Machine};
use super::cache::HostKernel;
use super::error::{Context, HostError, LogTail};
use super::image::{self, FileSource};
use super::interrupts::Interrupts;
use super::link::{Event, Link};
use super::program::{THIS_PROGRAM, program};
use super::qemu::{self, Log, Process, Qemu, fd_path};
use super::wire::{self, Frame, Hello, Kind, Put};
use vmtrace_initramfs::Modules;
use vmtrace_system::say;

/// How often interrupts and time limits are checked.
pub(super) const TICK: Duration = Duration::from_millis(50);
/// So many QEMUs are started at most, should they crash or one of them hang.
const STARTS: u32 = 3;

/// What an emulated host is like.
#[derive(Debug)]
pub struct HostOptions {
    /// Its architecture.
    pub arch: HostArch,
    /// Number of CPUs for guests and programs.
    pub cpus: u32,
    /// Memory in MiB; files and guests of its jobs need room in it.
    pub memory: u32,
    /// What its CPUs have beside the usual, as properties of QEMU's `-cpu` (`family=23`).
    pub cpu_properties: &'static [&'static str],
    /// Deterministic time by counted instructions (one CPU): for measurements.
    pub icount: bool,
    /// Files it has from the start: absolute path in the host, and content.
    pub files: Vec<(String, FileSource)>,
    /// Disks of the machine, `/dev/vda` and so on in this order.
    pub disks: Vec<HostDisk>,
    /// The vmtrace that runs in it.
    pub vmtrace: PathBuf,
    /// Which sources that vmtrace should be built from, as it says ([`init::main`](crate::init::main)):
    /// the user is told of another one. Empty: any.
    pub source: &'static str,
    /// Shows its log on standard error.
    pub verbose: bool,
    /// Says on standard error that it is being started, if that takes a while.
    pub progress: bool,
    /// How long it may take to come up.
    pub start_timeout: Duration,
    /// The user's signals, if they are to be passed on.
    pub interrupts: Option<Arc<Interrupts>>,
}

impl HostOptions {
    /// What is usual, for an architecture.
    ///
    /// # Errors
    /// When there is no vmtrace that could run there.
    pub fn new(arch: HostArch) -> Result<Self, HostError> {
        Ok(Self { arch, vmtrace: program(arch)?, ..Self::default() })
    }
}

/// What is usual, for the architecture of this machine.
impl Default for HostOptions {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get().min(4));
        Self {
            arch: HostArch::native(),
            cpus: u32::try_from(cpus).unwrap_or(1),
            memory: 2048,
            cpu_properties: &[],
            icount: false,
            files: Vec::new(),
            disks: Vec::new(),
            vmtrace: PathBuf::from(THIS_PROGRAM),
            source: "",
            verbose: false,
            progress: false,
            start_timeout: Duration::from_secs(120),
            interrupts: None,
        }
    }
}

/// A raw image or a block device of this machine, for the emulated host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostDisk {
    /// The file.
    pub path: PathBuf,
    /// It may be written.
    pub writable: bool,
    /// It is a device and no file.
    pub block_device: bool,
}

impl HostDisk {
    /// What QEMU is told: a node of this name, whose flushes and discards come through.
    fn node(&self, name: &str) -> String {
        let driver = if self.block_device { "host_device" } else { "file" };
        json!({
            "driver": "raw",
            "node-name": name,
            "read-only": !self.writable,
            "discard": "unmap",
            "file": { "driver": driver, "filename": self.path.display().to_string(), "discard": "unmap" },
        })
        .to_string()
    }
}

/// A running emulated host. It ends with this value, and with this process however that ends.
#[derive(Debug)]
pub struct EmulatedHost {
    // Dropped first: everything below only waits for its end.
    process: Process,
    pub(super) link: Link,
    pub(super) events: mpsc::Receiver<Event>,
    pub(super) log: Log,
    hello: Hello,
    start_time: Duration,
}

impl EmulatedHost {
    /// Boots one and waits until it takes jobs. Where QEMU crashes or hangs meanwhile, which its
    /// several CPUs can do to it as they come up (docs/architecture.md), another one is started.
    ///
    /// # Errors
    /// When there cannot be one, or it does not come up.
    pub fn start(options: &HostOptions) -> Result<Self, HostError> {
        let mut tries = 1;
        let mut hung = false;
        loop {
            match Self::start_once(options) {
                Err(HostError::Died { how, crashed: true, .. }) if tries < STARTS => {
                    say!(
                        "vmtrace: warning: the emulator crashed as it started ({how}); trying again"
                    );
                }
                // Once: a machine that is too slow is not told from one that hangs.
                Err(HostError::StartTimeout { after, log }) if !hung && tries < STARTS => {
                    hung = true;
                    say!(
                        "vmtrace: warning: the emulated host was not up after {} s; trying again{log}",
                        after.as_secs()
                    );
                }
                result => return result,
            }
            tries += 1;
        }
    }

    fn start_once(options: &HostOptions) -> Result<Self, HostError> {
        let begin = Instant::now();
        let machine = options.arch.machine();
        let qemu = Qemu::find(machine)?;
        let kernel = HostKernel::find(options.arch)?;
        let for_disks: &[&str] = if options.disks.is_empty() { &[] } else { &["virtio_blk"] };
        let modules = [machine.modules, for_disks].concat();
        let modules = Modules::open(&kernel.modules)?.resolve(&modules)?;
        let initramfs = image::build(&options.vmtrace, &modules, &options.files)?;

        let (control, control_qemu) = UnixStream::pair().context("make a socket")?;
        let (console, console_qemu) = UnixStream::pair().context("make a socket")?;
        let (errors, errors_qemu) = std::io::pipe().context("make a pipe")?;
        let image = kernel_file(&kernel)?;
        let mut command =
            command(machine, &qemu, options, &image, &initramfs, &control_qemu, &console_qemu);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors_qemu);

        let log = Log::default();
        log.follow(console, options.verbose)?;
        log.follow(errors, options.verbose)?;
        let (sender, events) = mpsc::channel();
        let on_exit = {
            let sender = sender.clone();
            move |status| drop(sender.send(Event::Died(status)))
        };
        let fds: Vec<OwnedFd> =
            vec![image.into(), initramfs.into(), control_qemu.into(), console_qemu.into()];
        let process = Process::start(command, fds, on_exit)?;
        let link = Link::start(control, sender).context("start a thread")?;
        let hello = Hello { release: kernel.release, ..Hello::default() };
        let mut host = Self { process, link, events, log, hello, start_time: Duration::ZERO };
        host.hello = host.wait_hello(options, machine, begin)?;
        host.start_time = begin.elapsed();
        Ok(host)
    }

    /// How long it took until jobs were accepted.
    pub fn start_time(&self) -> Duration {
        self.start_time
    }

    /// The release of its kernel.
    pub fn kernel_release(&self) -> &str {
        &self.hello.release
    }

    /// Makes a file, executable or not, with the directories above it.
    pub fn put_file(&mut self, path: &str, source: &FileSource) -> Result<(), HostError> {
        let (content, _, mode) = source.open()?;
        let stream = self.link.open_write();
        let request = Frame::json(Kind::Put, stream, &Put { path: path.to_owned(), mode });
        self.send(&request.map_err(|e| HostError::Protocol(e.to_string()))?)?;
        let copied = self.link.copy(stream, content);
        loop {
            match self.event(TICK)? {
                Some(Event::Done(id)) if id == stream => break,
                Some(Event::Failed(id, reason)) if id == stream => {
                    return Err(HostError::Failed {
                        what: format!("make the file {path}"),
                        reason,
                    });
                }
                _ => {}
            }
        }
        copied.map_err(|reason| HostError::Input { what: format!("the file for {path}"), reason })
    }

    /// The end of its log.
    pub fn log_tail(&self) -> LogTail {
        self.log.tail()
    }

    /// Ends it at once, whatever it does.
    pub(super) fn kill(&self) {
        self.process.kill();
    }

    pub(super) fn send(&self, frame: &Frame) -> Result<(), HostError> {
        // A connection that cannot be written ends: why is known when its end arrives as an event.
        match self.link.send(frame) {
            Ok(()) => Ok(()),
            Err(_) => Err(self.died("the connection broke".to_owned(), false)),
        }
    }

    /// The next event, if one comes soon.
    pub(super) fn event(&self, wait: Duration) -> Result<Option<Event>, HostError> {
        match self.events.recv_timeout(wait) {
            Ok(Event::Died(status)) => {
                Err(self.died(qemu::describe(status), qemu::crashed(status)))
            }
            Ok(Event::Lost(Some(error))) => Err(HostError::Protocol(error.to_string())),
            // QEMU's own end follows and says more.
            Ok(Event::Lost(None)) => Ok(None),
            Ok(event) => Ok(Some(event)),
            Err(mpsc::RecvTimeoutError::Timeout) => Ok(None),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(self.died("it is gone".to_owned(), false))
            }
        }
    }

    fn died(&self, how: String, crashed: bool) -> HostError {
        // Its last words may still be under way.
        std::thread::sleep(TICK);
        HostError::Died { how, crashed, log: self.log.tail() }
    }

    fn wait_hello(
        &self,
        options: &HostOptions,
        machine: &Machine,
        begin: Instant,
    ) -> Result<Hello, HostError> {
        let mut progress = Progress::new(options.progress && !options.verbose, machine, begin);
        loop {
            if let Some(Event::Hello(hello)) = self.event(TICK)? {
                progress.done();
                if hello.protocol != wire::PROTOCOL {
                    return Err(HostError::Protocol(
                        "the emulated host runs another vmtrace".to_owned(),
                    ));
                }
                if !options.source.is_empty() && hello.source != options.source {
                    say!(
                        "vmtrace: warning: {} was built from different sources than this program; build it again: cargo \
                         build --release --target {} --package vmtrace",
                        options.vmtrace.display(),
                        machine.target
                    );
                }
                return match hello.kvm_error {
                    Some(reason) => Err(HostError::NoKvm { reason, log: self.log.tail() }),
                    None => Ok(hello),
                };
            }
            progress.tick();
            if options.interrupts.as_ref().is_some_and(|i| i.count() > 0) {
                return Err(HostError::Interrupted);
            }
            if begin.elapsed() > options.start_timeout {
                return Err(HostError::StartTimeout {
                    after: begin.elapsed(),
                    log: self.log.tail(),
                });
            }
        }
    }
}

/// The kernel in a file without a name. An ELF file boots by its PVH entry at once, where a bzImage would first
/// be decompressed by the emulated CPU.
fn kernel_file(kernel: &HostKernel) -> Result<File, HostError> {
    let bad = |reason: String| HostError::BadKernel { path: kernel.image.clone(), reason };
    let image = vmtrace_kernel::unpack(&kernel.image).map_err(|e| bad(e.to_string()))?;
    let mut file = image::unnamed_file(c"vmtrace-host-kernel")?;
    file.write_all(&image).map_err(|e| bad(e.to_string()))?;
    Ok(file)
}

fn command(
    machine: &Machine,
    qemu: &Qemu,
    options: &HostOptions,
    kernel: &File,
    initramfs: &File,
    control: &UnixStream,
    console: &UnixStream,
) -> Command {
    use std::os::fd::AsRawFd;
    let mut command = Command::new(&qemu.program);
    let mut arg = |name: &str, value: &str| {
        command.args([name, value]);
    };
    arg("-name", "vmtrace-host");
    arg("-machine", machine.machine);
    arg("-cpu", &[&[machine.cpu], options.cpu_properties].concat().join(","));
    arg("-m", &format!("{}M", options.memory));
    let mut cmdline = machine.cmdline.join(" ");
    if options.icount {
        arg("-accel", "tcg,thread=single");
        arg("-icount", "shift=1,sleep=off");
        arg("-smp", "1");
    } else {
        let apart = u32::from(machine.first_cpu_apart);
        if apart > 0 {
            // It gets no process, and so no vCPU's thread.
            cmdline.push_str(" isolcpus=0");
        }
        arg("-accel", "tcg,thread=multi");
        arg("-smp", &(options.cpus.max(1) + apart).to_string());
    }
    arg("-chardev", &format!("socket,id=control,fd={}", control.as_raw_fd()));
    arg("-device", machine.virtio_serial);
    arg("-device", &format!("virtserialport,chardev=control,name={}", wire::PORT));
    // The first device is the first disk in there: virtio_blk gives names in the order of the bus.
    for (number, disk) in options.disks.iter().enumerate() {
        let name = format!("disk{number}");
        arg("-blockdev", &disk.node(&name));
        arg("-device", &format!("virtio-blk-pci,drive={name}"));
    }
    arg("-chardev", &format!("socket,id=console,fd={}", console.as_raw_fd()));
    arg("-serial", "chardev:console");
    arg("-append", &cmdline);
    command.arg("-kernel").arg(fd_path(kernel)).arg("-initrd").arg(fd_path(initramfs));
    command.args([
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
        "-display",
        "none",
        "-monitor",
        "none",
    ]);
    command
}

/// "starting the emulated host ... 6.2 s", once it takes long enough to be noticed.
struct Progress {
    text: Option<String>,
    begin: Instant,
    shown: bool,
}

impl Progress {
    const QUIET: Duration = Duration::from_secs(1);

    fn new(wanted: bool, machine: &Machine, begin: Instant) -> Self {
        let text =
            format!("vmtrace: starting the emulated host (QEMU TCG, {})", machine.virtualization);
        Self { text: wanted.then_some(text), begin, shown: false }
    }

    fn tick(&mut self) {
        let Some(text) = &self.text else { return };
        let time = self.begin.elapsed();
        let mut out = std::io::stderr();
        if out.is_terminal() && time > Self::QUIET {
            let _ = write!(out, "\r{text} ... {:.1} s", time.as_secs_f64());
        } else if !self.shown && time > Self::QUIET {
            let _ = write!(out, "{text} ...");
        } else {
            return;
        }
        self.shown = true;
        let _ = out.flush();
    }

    fn done(&mut self) {
        let Some(text) = self.text.take().filter(|_| self.shown) else { return };
        let mut out = std::io::stderr();
        let time = self.begin.elapsed().as_secs_f64();
        let _ = if out.is_terminal() {
            writeln!(out, "\r{text} ... {time:.1} s")
        } else {
            writeln!(out, " {time:.1} s")
        };
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // An error is printed next, on a line of its own.
        if self.text.is_some() && self.shown {
            let _ = writeln!(std::io::stderr());
        }
    }
}
