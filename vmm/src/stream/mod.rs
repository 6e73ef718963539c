//! The trace stream: wire format, writer, reader.
