//! Puts a mark into the trace: by vsock, or by the serial port in a guest without it.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::ExitCode;

use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, VsockAddr, sockopt};
use nix::sys::time::TimeVal;

use crate::channel::Channel;
use crate::clock;
use crate::protocol::{MARK_MAX, TRACE_PORT};

/// The time to wait for an answer. The VMM answers at once unless it is stopped.
const TIMEOUT: TimeVal = TimeVal::new(10, 0);

/// A longer answer is none of the VMM's.
const ANSWER_MAX: u64 = 256;

/// `mark TEXT...`
pub(crate) fn mark(args: &[OsString]) -> ExitCode {
    // First: what follows takes time.
    let ticks = clock::ticks();
    let text = args.join(" ".as_ref());
    let result = match text.to_str() {
        Some("") | None => Err("usage: mark TEXT".to_owned()),
        Some(text) if text.len() > MARK_MAX => {
            Err(format!("the text has {} bytes, {MARK_MAX} are allowed", text.len()))
        }
        Some(text) if text.chars().any(char::is_control) => {
            Err("the text must be one line without control characters".to_owned())
        }
        Some(text) => put(ticks, text),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mark: {error}");
            ExitCode::FAILURE
        }
    }
}

fn put(ticks: u64, text: &str) -> Result<(), String> {
    let vsock = match connect() {
        Ok(socket) => return say(File::from(socket), ticks, text),
        Err(error) => error,
    };
    if Channel::open().mark(ticks, text) {
        return Ok(());
    }
    Err(format!(
        "vmtrace cannot be reached: vsock port {TRACE_PORT}: {vsock}; and no second serial port"
    ))
}

fn connect() -> nix::Result<OwnedFd> {
    let (kind, flags) = (SockType::Stream, SockFlag::SOCK_CLOEXEC);
    let socket = socket::socket(AddressFamily::Vsock, kind, flags, None)?;
    socket::setsockopt(&socket, sockopt::ReceiveTimeout, &TIMEOUT)?;
    socket::setsockopt(&socket, sockopt::SendTimeout, &TIMEOUT)?;
    socket::connect(socket.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_HOST, TRACE_PORT))?;
    Ok(socket)
}

/// Sends the mark and reads the answer. No second way after this: the mark may be there already.
fn say(mut socket: impl Read + Write, ticks: u64, text: &str) -> Result<(), String> {
    let mut answer = Vec::new();
    let said = socket.write_all(format!("mark {ticks} {text}\n").as_bytes()).and_then(|()| {
        BufReader::new(socket.take(ANSWER_MAX)).read_until(b'\n', &mut answer)?;
        let whole = answer.pop() == Some(b'\n');
        if whole { Ok(()) } else { Err(io::Error::from(ErrorKind::UnexpectedEof)) }
    });
    said.map_err(|error| format!("vsock port {TRACE_PORT}: {error}"))?;
    let answer = String::from_utf8_lossy(&answer);
    match answer.split_once(' ') {
        None if answer == "OK" => Ok(()),
        Some(("ERR", reason)) => {
            Err(format!("vmtrace refuses the mark: {}", reason.escape_debug()))
        }
        _ => Err(format!("vsock port {TRACE_PORT} answers {answer:?}: is it vmtrace's?")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn answered(answer: &str) -> (Result<(), String>, String) {
        let (here, mut there) = UnixStream::pair().unwrap();
        there.write_all(answer.as_bytes()).unwrap();
        there.shutdown(std::net::Shutdown::Write).unwrap();
        let result = say(&here, 12, "a b");
        here.shutdown(std::net::Shutdown::Write).unwrap();
        let mut sent = String::new();
        there.read_to_string(&mut sent).unwrap();
        (result, sent)
    }

    #[test]
    fn the_line_and_its_answers() {
        assert_eq!(answered("OK\nmore"), (Ok(()), "mark 12 a b\n".to_owned()));
        let error = |answer| answered(answer).0.unwrap_err();
        assert!(error("ERR not\x1b now\n").ends_with("refuses the mark: not\\u{1b} now"));
        assert!(error("HTTP/1.0 400\n").contains("is it vmtrace's?"));
        assert!(error("OK").contains("end of file"), "{}", error("OK"));
        assert!(error(&"x".repeat(1000)).contains("end of file"));
    }

    #[test]
    fn the_clock_goes_forward() {
        let first = clock::ticks();
        assert!(clock::ticks() > first);
    }
}
