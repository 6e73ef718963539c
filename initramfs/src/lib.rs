//! Initial RAM file systems, made in memory: the guest's built-in one with the agent as `/init`, and the
//! archive format that the emulated host's one is made of too.

mod archive;
mod built_in;
mod contents;
mod error;
mod modules;
mod userland;

pub use archive::Archive;
pub use built_in::{AGENT, AGENT_BESIDE, APPLETS, AgentAs, Builder, add_agent};
pub use contents::Contents;
pub use error::Error;
pub use modules::{LoadedModule, Modules};
pub use userland::Userland;
