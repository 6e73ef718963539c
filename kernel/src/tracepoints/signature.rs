//! The parameters that a tracepoint passes to its probes.

use super::super::Kernel;
use super::super::arguments::{ModuleTypes, NoPrototype, PathError, Prototype, Value};

impl Kernel {
    /// What the probes of a tracepoint are called with, by its name, and the types of the module that
    /// has it: the first word is the probe's own and not among these.
    ///
    /// # Errors
    /// Why it is not known.
    pub fn tracepoint_prototype(
        &self,
        name: &str,
        module: Option<&ModuleTypes>,
    ) -> Result<Prototype, NoPrototype> {
        let mut prototype = self.prototype_of_name(&iterator(name), module)?;
        prototype.parameters.retain(|parameter| parameter.name != OWN);
        Ok(prototype)
    }

    /// One value of what the probes of a tracepoint are called with: see [`Kernel::path`].
    ///
    /// # Errors
    /// The place in the text and what is wrong there.
    pub fn tracepoint_path(&self, name: &str, text: &str) -> Result<Value, PathError> {
        self.path_of_name(&iterator(name), text)
    }
}

/// The parameter that is the probe's own.
const OWN: &str = "__data";

/// What calls the probes, with what they are called with.
fn iterator(name: &str) -> String {
    format!("__traceiter_{name}")
}
