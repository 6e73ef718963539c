//! Makes initial RAM file systems in memory: the guest's built-in one, with the agent as `/init`. The
//! emulated host's one uses the same archive format.

mod archive;
mod built_in;
mod contents;
mod error;
mod modules;
mod userland;

pub use archive::Archive;
pub use built_in::{AGENT, AGENT_BESIDE, AgentAs, Builder, add_agent};
pub use contents::{Contents, is_initrd};
pub use error::Error;
pub use modules::{LoadedModule, Modules};
pub use userland::{APPLETS, Userland};
