//! An attachment: the annex in a guest, the trampoline, the sites that call it.

use super::annex::{Addressing, Layout, Memory};
use super::arch::{context, context::Context, map};
use super::ftrace::{self, Records};
use super::guest::{Guest, GuestError, Image};
use super::patch::{Patch, Patcher, Restored, Skip, SkipReason};
use super::ring::RingReader;
use super::tasks::Tasks;
use crate::kernel::Kernel;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmtrace_trampolines::Fixup;
use vmtrace_trampolines::x86_64::{self as trampoline, Overflow};

/// What to write and how.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What happens when a ring is full.
    pub overflow: Overflow,
    /// vCPUs of the guest.
    pub cpus: u64,
}

/// Why a guest cannot be traced, or not any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// Guest memory is not as it should be.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The image lacks what is needed.
    #[error("{0}")]
    Kernel(String),
    /// A symbol is missing.
    #[error("the kernel image has no symbol {0}")]
    NoSymbol(&'static str),
    /// A structure member is missing from BTF.
    #[error("the kernel's BTF has no {0}.{1}")]
    NoMember(&'static str, &'static str),
    /// The annex has no place for so many rings.
    #[error("no rings for {0} vCPUs: 1 to 64 can be traced")]
    Cpus(u64),
    /// The annex memory is unusable.
    #[error("the annex memory is too small")]
    Annex,
    /// The guest's own ftrace is not as expected.
    #[error("the guest's ftrace cannot be understood: {0}")]
    Ftrace(&'static str),
    /// A template has a hole that cannot be filled.
    #[error(transparent)]
    Template(#[from] vmtrace_trampolines::TemplateError),
}

/// What attaching did, and how long it took.
#[derive(Clone, Debug, Default)]
pub struct AttachReport {
    /// Sites asked for.
    pub matched: usize,
    /// Sites that call the trampoline now.
    pub patched: usize,
    /// Sites left alone, with reasons.
    pub skipped: Vec<Skip>,
    /// Time for verifying, writing and reading back all sites.
    pub patch_time: Duration,
}

/// The tracer's hold on one guest.
pub struct Attachment {
    image: Image,
    layout: Layout,
    memory: Arc<dyn Memory>,
    context: Context,
    options: Options,
    target: u64,
    patcher: Patcher,
}

impl Attachment {
    /// Puts the annex into the guest's kernel half: right after `ftrace_init`,
    /// when the kernel has finished its own page tables. No site is touched.
    ///
    /// # Errors
    /// When anything is not as it should be; the guest is then unchanged.
    pub fn new(
        guest: &dyn Guest,
        kernel: &Kernel,
        image: Image,
        memory: Arc<dyn Memory>,
        options: Options,
    ) -> Result<Self, TraceError> {
        let context = Context::find(kernel, &image)?;
        let layout = Layout::new(&context::gs_bases(guest, kernel, &image, options.cpus)?)?;
        let code = trampoline_code(&layout, &context, options)?;
        layout.install(&memory.slice(), &code)?;
        let text = kernel.symbols().address("_text").ok_or(TraceError::NoSymbol("_text"))?;
        map::map(guest, &image, image.runtime(text), memory.guest_address())?;
        let patcher = Patcher::default();
        Ok(Self { image, layout, memory, context, options, target: map::ADDRESS, patcher })
    }

    /// One reader for each vCPU's ring. To be called once.
    #[must_use]
    pub fn readers(&self) -> Vec<RingReader> {
        RingReader::all(&self.layout, &self.memory, self.options.overflow == Overflow::Overwrite)
    }

    /// A reader of task names.
    #[must_use]
    pub fn tasks(&self) -> Tasks {
        Tasks::new(self.image, self.context.comm)
    }

    /// The running kernel.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// How trampolines find their control block.
    #[must_use]
    pub fn addressing(&self) -> Addressing {
        self.layout.addressing
    }

    /// Lets `sites` (indices into `kernel.sites()`) call the trampoline. All
    /// vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used half-way; the sites are then as before.
    pub fn enable(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        sites: &[usize],
    ) -> Result<AttachReport, TraceError> {
        let start = Instant::now();
        let records = Records::read(guest, &self.image, kernel)?;
        log::debug!("the guest's ftrace knows {} sites", records.len());
        let before = self.patcher.len();
        let skipped = self.patcher.hold(
            guest,
            &self.image,
            kernel,
            &records,
            sites,
            Patch::Call(self.target),
        )?;
        Ok(AttachReport {
            matched: sites.len(),
            patched: self.patcher.len() - before,
            skipped,
            patch_time: start.elapsed(),
        })
    }

    /// Puts a trap instruction on a site: the guest stops when the function is
    /// first called. Returns the run-time address of the trap, or why there is
    /// none. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn arm(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        site: usize,
        trap: [u8; 2],
    ) -> Result<Result<u64, SkipReason>, TraceError> {
        let records = Records::read(guest, &self.image, kernel)?;
        let patch = Patch::Trap(trap);
        let skipped = self.patcher.hold(guest, &self.image, kernel, &records, &[site], patch)?;
        Ok(match (skipped.first(), kernel.sites().get(site)) {
            (None, Some(site)) => Ok(self.image.runtime(site.location)),
            (Some(skip), _) => Err(skip.reason),
            (None, None) => Err(SkipReason::Unknown),
        })
    }

    /// Takes the trap of [`Attachment::arm`] away. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn disarm(&mut self, guest: &dyn Guest, site: usize) -> Result<(), TraceError> {
        self.patcher.release_one(guest, site)?;
        Ok(())
    }

    /// Sites that are ours.
    #[must_use]
    pub fn held(&self) -> usize {
        self.patcher.len()
    }

    /// Gives the sites of `.init.text` back, before the guest frees that memory.
    /// All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn release_init(&mut self, guest: &dyn Guest) -> Result<Restored, TraceError> {
        Ok(self.patcher.release_init(guest)?)
    }

    /// Gives every site back. The trampoline and the rings stay mapped: a task
    /// may be interrupted in them. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn release_all(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
    ) -> Result<Restored, TraceError> {
        let idle = ftrace::is_idle(guest, &self.image, kernel);
        Ok(self.patcher.release_all(guest, idle)?)
    }
}

fn trampoline_code(
    layout: &Layout,
    context: &Context,
    options: Options,
) -> Result<Vec<u8>, TraceError> {
    let stride = layout.rings.first().map_or(0, vmtrace_trampolines::layout::Ring::stride);
    let mut values = vec![
        (Fixup::Current, context.current),
        (Fixup::Pid, context.pid),
        (Fixup::RingMask, stride.wrapping_neg()),
        (Fixup::CpuNumber, context.cpu_number),
        (Fixup::CpuCount, layout.rings.len() as u64),
    ];
    let addressing = match layout.addressing {
        Addressing::PerCpu(distance) => {
            values.push((Fixup::ControlFromGs, distance));
            trampoline::Addressing::PerCpu
        }
        Addressing::Table(address) => {
            values.push((Fixup::ControlTable, address));
            trampoline::Addressing::Shared
        }
    };
    let template = trampoline::entry(addressing, options.overflow);
    let mut code = vec![0; template.code().len()];
    template.instantiate(&mut code, &values)?;
    Ok(code)
}
