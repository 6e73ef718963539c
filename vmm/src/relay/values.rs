//! Values of calls: where they are in records, and how the stream describes them.

use super::names::ModuleNames;
use crate::kernel::Kernel;
use crate::stream::{Header, Shape, ValueField, ValuesFormat, ValuesOf};
use rustc_hash::FxHashMap;
use std::sync::Arc;
use vmtrace_trampolines::Field;

/// Whether what is of this shape may be an address. Places in code are most often numbers (`unsigned long`).
pub(super) fn may_be_address(shape: &Shape) -> bool {
    matches!(shape, Shape::Pointer | Shape::Unsigned { bytes: 8 })
}

/// What a tracer records of calls beside that they happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Values {
    /// Of entries, by site (an index into [`Kernel::sites`]).
    pub entries: Arc<FxHashMap<usize, Recorded>>,
    /// How the value that a function returns is to be read, by site.
    pub results: Arc<FxHashMap<usize, ValueField>>,
}

/// Values of a function's entries, and where they are found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    /// In the order of `values`: together they have as many words.
    pub fields: Vec<Field>,
    /// What they are.
    pub values: Vec<ValueField>,
}

/// What the stream has not been told yet.
#[derive(Debug, Default)]
pub(super) struct Untold {
    values: FxHashMap<u8, Values>,
    /// Sites by the low half of the entry address, of functions that have values.
    sites: FxHashMap<u32, usize>,
    told: rustc_hash::FxHashSet<(u32, u8, bool)>,
}

impl Untold {
    /// These are all that there are, in a kernel that runs at `slide`.
    pub(super) fn set(
        &mut self,
        kernel: &Kernel,
        modules: &ModuleNames,
        slide: u64,
        tracers: impl Iterator<Item = (u8, Values)>,
    ) {
        *self = Self::default();
        self.values.extend(tracers);
        let values = self.values.values();
        let sites = values.flat_map(|one| one.entries.keys().chain(one.results.keys()));
        for &index in sites {
            let Some(site) = modules.site(kernel, index) else { continue };
            let low = site.entry.wrapping_add(slide).wrapping_sub(Header::TOP_4_GIB);
            self.sites.extend(u32::try_from(low).map(|low| (low, index)));
        }
    }

    /// The values of a function (low half of its entry address) for a tracer, in their order, if it has any.
    pub(super) fn fields(&self, function: u32, tracer: u8, of: ValuesOf) -> Option<&[ValueField]> {
        let (site, values) = (self.sites.get(&function)?, self.values.get(&tracer)?);
        match of {
            ValuesOf::Entry => values.entries.get(site).map(|it| &*it.values),
            ValuesOf::Return => values.results.get(site).map(std::slice::from_ref),
            ValuesOf::Event => None,
        }
    }

    /// What is to be told before this record, the first of a function (low half of its entry
    /// address) for a tracer.
    #[inline]
    pub(super) fn first(
        &mut self,
        function: u32,
        tracer: u8,
        of: ValuesOf,
    ) -> Option<ValuesFormat> {
        if !self.told.insert((function, tracer, of == ValuesOf::Return)) {
            return None;
        }
        let values = self.fields(function, tracer, of)?.to_vec();
        Some(ValuesFormat { function, tracer, of, values, print: None })
    }
}
