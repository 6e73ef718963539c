//! Tracepoints of a loaded module, and those that it uses, from its `struct module`
//! (include/linux/module.h) once the module is ready.

use super::super::btf::Btf;
use super::super::{Kernel, KernelError};
use super::code::Hooks;
use super::keys::{self, Branch, Call};
use super::memory::Memory;
use super::{EventLayout, LONGEST};
use crate::read::u64_at;

/// What a module has of tracepoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModuleTracepoints {
    /// Its own, each by its event.
    pub own: Vec<ModuleTracepoint>,
    /// Where its code comes by tracepoints, of its own or others.
    pub uses: Uses,
}

/// An event of a module, and what calls its tracepoint, but for the code that comes by it: see
/// [`ModuleTracepoints::uses`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleTracepoint {
    /// As it is asked for, such as `xfs:xfs_buf_free`.
    pub name: String,
    /// Address of its `struct trace_event_call`, as if the module were linked with the kernel.
    pub address: u64,
    /// The name of its tracepoint.
    pub point: String,
    /// Of its tracepoint.
    pub hooks: Hooks,
}

/// Code of a module that may come by tracepoints, of whatever keys: addresses as if the module were
/// linked with the kernel. What runs only while the module is initialised is not among it: that is
/// freed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    branches: Vec<(u64, Branch)>,
    calls: Vec<(u64, Call)>,
}

impl Uses {
    /// How many places it is.
    #[must_use]
    pub fn len(&self) -> usize {
        self.branches.len() + self.calls.len()
    }

    /// Whether it is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Hooks {
    /// Adds the code of a module that comes by it.
    pub fn add(&mut self, uses: &Uses) {
        fn of<T: Copy>(all: &[(u64, T)], key: u64) -> impl Iterator<Item = T> {
            all.iter().filter(move |(of, _)| *of == key).map(|&(_, it)| it)
        }
        self.branches.extend(of(&uses.branches, self.key));
        if let Some(calls) = &mut self.static_calls {
            calls.sites.extend(of(&uses.calls, calls.key));
        }
    }

    /// Whether there is code of a module that comes by it.
    #[must_use]
    pub fn is_used_in(&self, uses: &Uses) -> bool {
        uses.branches.iter().any(|(key, _)| *key == self.key)
    }
}

/// More than any module has.
pub(super) const MOST_EVENTS: u32 = 1 << 12;
const MOST_ENTRIES: u32 = 1 << 17;
/// More modules than can be loaded, and larger than the type information of any.
const MOST_MODULES: usize = 1 << 14;
const MOST_TYPES: u32 = 64 << 20;

/// Where a module has what.
#[derive(Debug)]
pub(super) struct Layout {
    /// Tables, each with the number of its entries.
    events: Table,
    labels: Table,
    /// Not on all architectures.
    calls: Option<Table>,
    flags: u64,
    /// The flag of an event that comes from a tracepoint.
    of_tracepoint: u32,
    types: Option<TypesLayout>,
}

/// An event of a module: addresses of its class and its tracepoint, its system, and the name of its
/// tracepoint, which is its own.
pub(super) struct Head {
    pub(super) class: u64,
    pub(super) system: String,
    pub(super) tracepoint: u64,
    pub(super) point: String,
}

#[derive(Clone, Copy, Debug)]
struct Table {
    first: u64,
    count: u64,
}

/// Where the type information of modules is (kernel/bpf/btf.c).
#[derive(Debug)]
struct TypesLayout {
    list: u64,
    module: u64,
    btf: u64,
    data: u64,
    size: u64,
}

impl Layout {
    /// `None` in a kernel whose modules have no tracepoints.
    pub(super) fn find(btf: &Btf) -> Option<Self> {
        let offset = |strukt: &str, member: &str| btf.member_offset(strukt, member).map(u64::from);
        let own = |first: &str, count: &str| {
            Some(Table { first: offset("module", first)?, count: offset("module", count)? })
        };
        let types = || {
            Some(TypesLayout {
                list: offset("btf_module", "list")?,
                module: offset("btf_module", "module")?,
                btf: offset("btf_module", "btf")?,
                data: offset("btf", "data")?,
                size: offset("btf", "data_size")?,
            })
        };
        Some(Self {
            events: own("trace_events", "num_trace_events")?,
            labels: own("jump_entries", "num_jump_entries")?,
            calls: own("static_call_sites", "num_static_call_sites"),
            flags: offset("trace_event_call", "flags")?,
            of_tracepoint: u32::try_from(btf.enumerator("TRACE_EVENT_FL_TRACEPOINT")?).ok()?,
            types: types(),
        })
    }
}

impl Table {
    /// Its address and contents.
    fn read(
        self,
        memory: &dyn Memory,
        module: u64,
        size: usize,
        most: u32,
    ) -> Option<(u64, Vec<u8>)> {
        let count = memory.count(module.wrapping_add(self.count))?;
        if count == 0 || count > most {
            return (count == 0).then(Default::default);
        }
        let first = memory.pointer(module.wrapping_add(self.first))?;
        Some((first, memory.bytes(first, size * count as usize)?))
    }
}

impl Kernel {
    /// Whether it says where its modules have tracepoints, if it has modules.
    ///
    /// # Errors
    /// Why not.
    pub fn check_module_tracepoints(&self) -> Result<(), KernelError> {
        if self.symbols().address("do_init_module").is_none() {
            return Err(KernelError::Tracepoints("it has no modules"));
        }
        self.check_pointers()?;
        self.module_layout().map(drop)
    }

    pub(super) fn module_layout(&self) -> Result<(&EventLayout, &Layout), KernelError> {
        let unknown = "its type information does not describe those of modules";
        let layout = self.event_layout()?;
        self.check_branches()?;
        let own = layout.module.as_ref().ok_or(KernelError::Tracepoints(unknown))?;
        Ok((layout, own))
    }

    /// What a module has of tracepoints; `module` is the address of its `struct module`, as `memory`
    /// has addresses. It must be ready to be initialised, or loaded.
    ///
    /// # Errors
    /// When the kernel does not say where that is, or the module is not as it should be.
    pub fn module_tracepoints(
        &self,
        memory: &dyn Memory,
        module: u64,
    ) -> Result<ModuleTracepoints, KernelError> {
        self.check_pointers()?;
        let (layout, own) = self.module_layout()?;
        let read = || -> Option<ModuleTracepoints> {
            let uses = own.uses(memory, module)?;
            let (_, table) = own.events.read(memory, module, 8, MOST_EVENTS)?;
            let calls = table.chunks_exact(8).filter_map(|word| u64_at(word, 0));
            let calls = calls.map(|word| word.wrapping_sub(memory.slide()));
            let own =
                calls.filter_map(|call| self.module_event(memory, layout, own, call)).collect();
            Some(ModuleTracepoints { own, uses })
        };
        read().ok_or(KernelError::Tracepoints("those of a module are not as they should be"))
    }

    /// The event whose `struct trace_event_call` is there, if it comes from a tracepoint.
    fn module_event(
        &self,
        memory: &dyn Memory,
        layout: &EventLayout,
        own: &Layout,
        call: u64,
    ) -> Option<ModuleTracepoint> {
        let Head { system, tracepoint, point, .. } = own.head(memory, layout, call)?;
        let hooks = layout.points.read(self, memory, tracepoint)?;
        let name = format!("{system}:{point}");
        Some(ModuleTracepoint { name, address: call, point, hooks })
    }

    /// The type information of a module that is loaded: its `.BTF` section. None if it has none, or
    /// the kernel keeps none.
    #[must_use]
    pub fn module_btf(&self, memory: &dyn Memory, module: u64) -> Option<Vec<u8>> {
        let layout = self.module_layout().ok()?.1.types.as_ref()?;
        let head = self.symbols().address("btf_modules")?;
        let mut node = memory.pointer(head)?;
        for _ in 0..MOST_MODULES {
            if node == head {
                return None;
            }
            let at = |offset: u64| node.wrapping_sub(layout.list).wrapping_add(offset);
            if memory.pointer(at(layout.module))? == module {
                let btf = memory.pointer(at(layout.btf))?;
                let size = memory.count(btf.wrapping_add(layout.size))?;
                let data = memory.pointer(btf.wrapping_add(layout.data))?;
                return (size <= MOST_TYPES).then(|| memory.bytes(data, size as usize))?;
            }
            node = memory.pointer(node)?;
        }
        None
    }
}

impl Layout {
    /// What a `struct trace_event_call` of a module says, if its event comes from a tracepoint.
    pub(super) fn head(
        &self,
        memory: &dyn Memory,
        layout: &EventLayout,
        call: u64,
    ) -> Option<Head> {
        let at = |offset: u64| call.wrapping_add(offset);
        if memory.count(at(self.flags))? & self.of_tracepoint == 0 {
            return None;
        }
        let class = memory.pointer(at(layout.class))?;
        let system = memory.text_behind(class.wrapping_add(layout.system), LONGEST)?;
        let tracepoint = memory.pointer(at(layout.tracepoint))?;
        let point = memory.text_behind(tracepoint.wrapping_add(layout.points.name), LONGEST)?;
        Some(Head { class, system, tracepoint, point })
    }

    /// Where a module's code comes by tracepoints.
    fn uses(&self, memory: &dyn Memory, module: u64) -> Option<Uses> {
        /// That it is freed when the module is initialised (`jump_entry_set_init`,
        /// `static_call_set_init`).
        const INIT: u64 = 2;
        fn kept<T>(all: impl Iterator<Item = keys::Keyed<T>>) -> Vec<(u64, T)> {
            let kept = all.filter(|(_, flags, _)| flags & INIT == 0);
            kept.map(|(key, _, it)| (key, it)).collect()
        }
        let (start, labels) = self.labels.read(memory, module, 16, MOST_ENTRIES)?;
        let branches = kept(keys::branches(start, &labels));
        let calls = match self.calls {
            None => Vec::new(),
            Some(table) => {
                let (start, calls) = table.read(memory, module, 8, MOST_ENTRIES)?;
                kept(keys::calls(start, &calls))
            }
        };
        Some(Uses { branches, calls })
    }
}
