//! The virtual machine: memory, vCPUs, pause.
