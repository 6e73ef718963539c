//! Vsock ports as Unix sockets, by Firecracker's convention. A client connects to a socket and
//! names a port of the guest in a line. Each port of the host is a socket beside it.

use std::path::{Path, PathBuf};

/// The path of a port's socket.
#[must_use]
pub fn beside(socket: &Path, port: u32) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(format!("_{port}"));
    path.into()
}

/// The port of a request: `CONNECT` in any case, and a number.
#[must_use]
pub fn requested(line: &[u8]) -> Option<u32> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let (command, port, rest) = (words.next()?, words.next()?, words.next());
    if !command.eq_ignore_ascii_case("CONNECT") || rest.is_some() || port.starts_with('+') {
        return None;
    }
    port.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_understood_or_refused() {
        for (line, port) in [
            ("CONNECT 52", Some(52)),
            ("connect 4294967295\r", Some(u32::MAX)),
            ("CONNECT 4294967296", None),
            ("CONNECT -1", None),
            ("CONNECT +1", None),
            ("CONNECT", None),
            ("CONNECT 1 2", None),
            ("GET / HTTP/1.1", None),
            ("", None),
        ] {
            assert_eq!(requested(line.as_bytes()), port, "{line}");
        }
        assert_eq!(requested(b"CONNECT \xff"), None);
    }
}
