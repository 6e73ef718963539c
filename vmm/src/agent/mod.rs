//! The guest's agent as the host sees it: what it says over the serial port, and what can be asked over vsock.
//!
//! Tracing does not depend on it. Nothing that comes from it is trusted.

mod channel;
mod client;
mod connect;
mod run;

pub use channel::{AgentMark, AgentMessage, AgentParser};
pub use client::{AgentError, Connection};
pub use connect::Endpoint;
pub use run::{Handle, Streams};
pub use vmtrace_agent::protocol;
