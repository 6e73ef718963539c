//! Calls of initcalls, and loads of modules.

use std::collections::HashMap;

use crate::export::{Entry, printable};
use crate::stream::Shown;

use super::INITCALL;

/// Most initcalls and modules that are kept.
const MOST: usize = 1 << 16;

/// What a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Initcall,
    /// Of a module: it is told with that.
    ModuleInitcall,
    Load,
    Init,
}

/// A call; times are in ticks, durations in nanoseconds.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) kind: Kind,
    /// The function or the module.
    pub(super) name: Option<String>,
    pub(super) level: Option<String>,
    pub(super) start: u64,
    pub(super) vcpu: u32,
    pub(super) pid: u32,
    pub(super) duration: Option<u64>,
    /// Ticks of it in which no vCPU had anything to do.
    pub(super) waited: u64,
    /// Of a load: how long the module's own init function took.
    pub(super) init: Option<u64>,
    /// Of what runs within the load of a module: that.
    within: Option<usize>,
    open: bool,
}

/// All calls, in their order.
#[derive(Debug, Default)]
pub(super) struct Calls {
    pub(super) list: Vec<Call>,
    /// So many there was no room for.
    pub(super) more: u64,
    /// Level and name of initcalls by address.
    pub(super) known: HashMap<u64, (String, String)>,
    /// Frames of calls that have not ended; several tracers have a frame each for one call.
    frames: HashMap<u64, usize>,
    /// The last call: time, vCPU, function, index.
    last: Option<(u64, u32, u64, usize)>,
    /// Modules that tasks have begun to load.
    files: HashMap<u32, String>,
    /// Calls that have not ended, by task, the innermost last.
    open: HashMap<u32, Vec<usize>>,
}

/// The module of a file, such as `virtio_net` of `virtio-net.ko.xz`. In an initramfs of ours numbers
/// stand before that, as in `003-virtio-net.ko`.
fn module_of(file: &[u8]) -> String {
    let name = printable(&String::from_utf8_lossy(file));
    let name = match name.split_once('-') {
        Some((number, rest)) if number.bytes().all(|c| c.is_ascii_digit()) => rest,
        _ => &name,
    };
    name.split(".ko").next().unwrap_or_default().replace('-', "_")
}

impl Calls {
    /// With level and name of initcalls, by their addresses.
    pub(super) fn new(known: HashMap<u64, (String, String)>) -> Self {
        Self { known, ..Self::default() }
    }

    /// The innermost open call of a task that is of a kind.
    fn around(&self, pid: u32, kinds: &[Kind]) -> Option<usize> {
        let open = self.open.get(&pid)?;
        let is = |index: &&usize| self.list.get(**index).is_some_and(|it| kinds.contains(&it.kind));
        open.iter().rev().find(is).copied()
    }

    /// A new call, or that of another tracer for the same; its index.
    fn add(&mut self, entry: &Entry<'_>, kind: Kind, within: Option<usize>) -> Option<usize> {
        let key = (entry.timestamp, entry.vcpu, entry.function.address);
        let same = self.last.filter(|&(ticks, vcpu, at, _)| (ticks, vcpu, at) == key);
        let index = match same {
            Some((.., index)) => index,
            None if self.list.len() >= MOST => {
                self.more += 1;
                return None;
            }
            None => {
                let index = self.list.len();
                self.list.push(Call {
                    kind,
                    name: None,
                    level: None,
                    start: entry.timestamp,
                    vcpu: entry.vcpu,
                    pid: entry.pid,
                    duration: None,
                    waited: 0,
                    init: None,
                    within,
                    open: false,
                });
                self.last = Some((key.0, key.1, key.2, index));
                index
            }
        };
        if let Some(place) = entry.place {
            self.frames.insert(place.frame, index);
            let call = self.list.get_mut(index)?;
            if !std::mem::replace(&mut call.open, true) {
                self.open.entry(entry.pid).or_default().push(index);
            }
        }
        Some(index)
    }

    /// An initcall is called.
    pub(super) fn initcall(&mut self, entry: &Entry<'_>) {
        let module = self.around(entry.pid, &[Kind::Load, Kind::Init]);
        let kind = if module.is_some() { Kind::ModuleInitcall } else { Kind::Initcall };
        let Some(index) = self.add(entry, kind, module) else { return };
        let function = entry.args.and_then(|args| {
            args.iter().find_map(|(_, value)| match value {
                Some(Shown::Pointer(address)) => Some(address),
                _ => None,
            })
        });
        let known = function.and_then(|address| self.known.get(&address)).cloned();
        let Some(call) = self.list.get_mut(index) else { return };
        match (known, function) {
            (Some((level, name)), _) => (call.level, call.name) = (Some(level), Some(name)),
            (None, Some(address)) if call.name.is_none() => {
                call.name = Some(format!("{address:#x}"));
            }
            _ => {}
        }
    }

    /// Any function is called: it may be the initcall itself.
    #[inline]
    pub(super) fn called(&mut self, entry: &Entry<'_>) {
        if self.open.is_empty() {
            return;
        }
        let caller = entry.caller.and_then(|caller| caller.symbol);
        if caller != Some((INITCALL, "")) {
            return;
        }
        let Some(index) = self.around(entry.pid, &[Kind::Initcall, Kind::ModuleInitcall]) else {
            return;
        };
        let known = self.known.get(&entry.function.address).cloned();
        let Some(call) = self.list.get_mut(index).filter(|call| call.name.is_none()) else {
            return;
        };
        match known {
            Some((level, name)) => (call.level, call.name) = (Some(level), Some(name)),
            None => call.name = Some(entry.function.label()),
        }
    }

    /// A module, or something else, is read from a file.
    pub(super) fn read_file(&mut self, entry: &Entry<'_>) {
        let Some(args) = entry.args else { return };
        let (mut file, mut is_module) = (None, true);
        for (_, value) in args.iter() {
            match value {
                Some(Shown::Text(text)) => file = Some(module_of(&text)),
                Some(Shown::Name(of)) => is_module = of == "READING_MODULE",
                _ => {}
            }
        }
        if let Some(file) = file.filter(|_| is_module)
            && self.files.len() < MOST
        {
            self.files.insert(entry.pid, file);
        }
    }

    /// A module is loaded.
    pub(super) fn load(&mut self, entry: &Entry<'_>) {
        if let Some(index) = self.add(entry, Kind::Load, None) {
            self.name_module(index, entry.pid);
        }
    }

    /// A module is initialised, mostly as a part of its load.
    pub(super) fn init(&mut self, entry: &Entry<'_>) {
        let load = self.around(entry.pid, &[Kind::Load]);
        if let Some(index) = self.add(entry, Kind::Init, load) {
            self.name_module(index, entry.pid);
        }
    }

    fn name_module(&mut self, index: usize, pid: u32) {
        if let Some(call) = self.list.get_mut(index).filter(|call| call.name.is_none()) {
            call.name = self.files.remove(&pid);
        }
    }

    /// A call has ended, after so many nanoseconds if that is certain.
    pub(super) fn returned(&mut self, frame: u64, duration: Option<u64>) {
        let Some(index) = self.frames.remove(&frame) else { return };
        let Some(call) = self.list.get_mut(index) else { return };
        call.duration = call.duration.or(duration);
        if std::mem::take(&mut call.open) {
            let pid = call.pid;
            if let Some(open) = self.open.get_mut(&pid) {
                open.retain(|&other| other != index);
                if open.is_empty() {
                    self.open.remove(&pid);
                }
            }
        }
        let (within, took) = (self.list.get(index), duration);
        let within = within.filter(|call| call.kind == Kind::ModuleInitcall);
        let mut at = within.and_then(|call| call.within);
        // What initialises it, and what loads it.
        for _ in 0..2 {
            let Some(call) = at.and_then(|index| self.list.get_mut(index)) else { break };
            call.init = call.init.or(took);
            at = call.within;
        }
    }

    /// From when to when, in ticks, no vCPU had anything to do.
    pub(super) fn waited(&mut self, (since, until): (u64, u64)) {
        for index in self.open.values().flatten() {
            if let Some(call) = self.list.get_mut(*index) {
                let waited = until.saturating_sub(since.max(call.start));
                call.waited = call.waited.saturating_add(waited);
            }
        }
    }

    /// Whether a call is told by the one around it.
    pub(super) fn is_within(call: &Call) -> bool {
        call.kind == Kind::Init && call.within.is_some()
    }
}
