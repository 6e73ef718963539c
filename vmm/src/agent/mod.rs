//! The host's side of the guest's agent: its lines on the serial port, and requests over vsock.
//!
//! Tracing does not depend on the agent. Nothing from it is trusted.

mod channel;
mod client;
mod connect;
mod run;

pub use channel::{AgentMark, AgentMessage, AgentParser};
pub use client::{AgentError, Connection};
pub use connect::Endpoint;
pub use run::{Handle, Streams};
pub use vmtrace_agent::protocol;
