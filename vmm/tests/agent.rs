//! The client of the agent protocol and the agent's server, both in this process, over socket pairs.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use vmtrace::agent::protocol::{
    Command, Decoder, Exit, Failure, Frame, Hello, Reason, Request, Run, Stream, WINDOW,
};
use vmtrace::agent::{AgentError, Connection, Handle, Streams};
use vmtrace_agent::reaper::Reaper;
use vmtrace_agent::server::{CONNECTIONS, Server};

fn server() -> Server {
    Server::new(Reaper::new())
}

fn connect(server: &Server) -> Connection {
    let (here, there) = UnixStream::pair().unwrap();
    server.attend(there.into());
    Connection::new(here.into()).unwrap()
}

fn program(words: &[&str]) -> Run {
    let words = words.iter().map(|word| word.as_bytes().to_vec()).collect();
    Run { command: Command::Program(words), directory: vec![], environment: vec![] }
}

fn shell(script: &str) -> Run {
    program(&["sh", "-c", script])
}

#[derive(Debug)]
struct Ran {
    exit: Result<Exit, AgentError>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

fn run_with(
    connection: Connection,
    run: Run,
    stdin: impl Read + Send + 'static,
    started: impl FnOnce(Handle),
) -> Ran {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let streams = Streams { stdin: Box::new(stdin), stdout: &mut stdout, stderr: &mut stderr };
    let exit = connection.run(run, streams, started);
    Ran { exit, stdout, stderr }
}

fn run(server: &Server, command: Run) -> Ran {
    run_with(connect(server), command, io::empty(), |_| {})
}

fn failure(ran: Ran) -> Failure {
    match ran.exit {
        Err(AgentError::Failed(failure)) => failure,
        other => panic!("{other:?}"),
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Waits until `done`, but not for ever.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < end, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Neither running nor waiting to be reaped.
fn is_gone(pid: &str) -> bool {
    fs::read_to_string(format!("/proc/{}/stat", pid.trim())).is_err()
}

/// Not running: orphans are reaped by whoever is process 1 here, in its own time.
fn is_dead(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    stat.map_or(true, |stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
}

/// Bytes that do not repeat soon.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()[0]
    };
    std::iter::repeat_with(next).take(length).collect()
}

#[test]
fn a_command_has_its_streams_and_its_status() {
    let ran = run(&server(), shell("echo out; echo err >&2; exit 7"));
    assert_eq!(ran.exit.unwrap(), Exit::Status(7));
    assert_eq!((text(&ran.stdout), text(&ran.stderr)), ("out\n", "err\n"));
    // A real-time signal too, which some libraries have no name for.
    for signal in [9, 15, 50] {
        let ran = run(&server(), shell(&format!("kill -{signal} $$")));
        assert_eq!(ran.exit.unwrap(), Exit::Signal(signal));
    }
}

#[test]
fn directory_environment_and_command_line() {
    let server = server();
    let there = Run {
        directory: b"/proc".to_vec(),
        environment: vec![b"A=b=c".to_vec(), b"E=".to_vec()],
        ..shell("pwd; echo $A; echo ${E-unset}")
    };
    assert_eq!(text(&run(&server, there).stdout), "/proc\nb=c\n\n");
    let line = Command::Line(b"echo a | tr a b && exit 3".to_vec());
    let ran = run(&server, Run { command: line, ..shell("") });
    assert_eq!((text(&ran.stdout), ran.exit.unwrap()), ("b\n", Exit::Status(3)));
}

#[test]
fn what_cannot_be_run_is_named() {
    let server = server();
    let missing = failure(run(&server, program(&["no-such-program"])));
    assert_eq!(missing.reason, Reason::NotFound);
    assert_eq!(missing.text, "no-such-program: command not found");
    assert_eq!(failure(run(&server, program(&["/no/such"]))).reason, Reason::NotFound);
    let data = failure(run(&server, program(&["/etc/passwd"])));
    assert_eq!((data.reason, data.text.starts_with("/etc/passwd: ")), (Reason::Denied, true));
    let bad = |run_: Run| {
        let failure = failure(run(&server, run_));
        assert_eq!(failure.reason, Reason::BadRequest);
        failure.text
    };
    assert_eq!(bad(program(&[])), "no program is named");
    let directory = Run { directory: b"/no/where".to_vec(), ..shell("") };
    assert!(bad(directory).starts_with("/no/where: No such file"));
    let environment = Run { environment: vec![b"=x".to_vec()], ..shell("") };
    assert!(bad(environment).contains("is not NAME=VALUE"));
    // A zero byte cannot be part of an argument.
    assert_eq!(failure(run(&server, program(&["echo", "a\0b"]))).reason, Reason::Other);
    let long = run(&server, program(&["echo", &"x".repeat(300_000)]));
    assert!(format!("{:?}", long.exit).contains("longer than 256 KiB"));
}

#[test]
fn much_data_both_ways_at_once() {
    let input = noise(20 << 20);
    let ran =
        run_with(connect(&server()), program(&["cat"]), io::Cursor::new(input.clone()), |_| {});
    assert_eq!(ran.exit.unwrap(), Exit::Status(0));
    assert!(ran.stdout == input);
}

/// A reader that takes nothing until it is told to.
struct Gate(std::sync::mpsc::Receiver<()>, Vec<u8>);

impl Write for Gate {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // An error: the gate is open.
        let _ = self.0.recv();
        self.1.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Tells when enough has been written.
struct Tell(Option<std::sync::mpsc::Sender<()>>, usize);

impl Write for Tell {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1 += bytes.len();
        if self.1 >= 4 << 20 {
            self.0 = None;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_stream_that_nobody_reads_does_not_stop_the_other() {
    // Standard output waits here until all of standard error has come: far more than any window.
    let (tell, told) = channel();
    let (mut stdout, mut stderr) = (Gate(told, Vec::new()), Tell(Some(tell), 0));
    let script = "head -c 4194304 /dev/zero & head -c 4194304 /dev/zero >&2; wait";
    let streams =
        Streams { stdin: Box::new(io::empty()), stdout: &mut stdout, stderr: &mut stderr };
    let exit = connect(&server()).run(shell(script), streams, |_| {});
    assert_eq!(exit.unwrap(), Exit::Status(0));
    assert_eq!((stdout.1.len(), stderr.1), (4 << 20, 4 << 20));
}

#[test]
fn input_that_nobody_reads_does_not_stop_the_output() {
    let ran = run_with(connect(&server()), shell("echo done"), io::repeat(1), |_| {});
    assert_eq!((ran.exit.unwrap(), text(&ran.stdout)), (Exit::Status(0), "done\n"));
    let ran = run_with(connect(&server()), program(&["head", "-c3"]), io::repeat(b'x'), |_| {});
    assert_eq!((ran.exit.unwrap(), text(&ran.stdout)), (Exit::Status(0), "xxx"));
}

/// Fails at the first byte.
struct Fails(io::ErrorKind);

impl Write for Fails {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(self.0.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_output_that_is_closed_here_is_closed_there() {
    let server = server();
    let yes = |kind| {
        let (mut stdout, mut stderr) = (Fails(kind), Vec::new());
        let streams =
            Streams { stdin: Box::new(io::empty()), stdout: &mut stdout, stderr: &mut stderr };
        connect(&server).run(program(&["yes"]), streams, |_| {})
    };
    assert_eq!(yes(io::ErrorKind::BrokenPipe).unwrap(), Exit::Signal(13));
    assert!(matches!(yes(io::ErrorKind::StorageFull), Err(AgentError::Output(_))));
}

#[test]
fn what_goes_on_in_the_background_is_not_waited_for() {
    let start = Instant::now();
    let ran = run(&server(), shell("sleep 60 & echo $!"));
    assert_eq!(ran.exit.unwrap(), Exit::Status(0));
    assert!(start.elapsed() < Duration::from_secs(30));
    let pid = text(&ran.stdout).trim().to_owned();
    assert!(!is_dead(&pid), "and goes on");
    assert!(std::process::Command::new("kill").arg(&pid).status().unwrap().success());
    // All that the command itself wrote arrives, whatever else writes to the same pipe.
    let ran = run(&server(), shell("yes background & head -c 60000 /dev/zero; kill $!"));
    assert_eq!(ran.stdout.iter().filter(|byte| **byte == 0).count(), 60000);
}

#[test]
fn signals_reach_the_whole_group() {
    let (tell, told) = channel();
    let (here, mut out) = io::pipe().unwrap();
    let server = server();
    let connection = connect(&server);
    let command = thread::spawn(move || {
        let mut stderr = Vec::new();
        let streams =
            Streams { stdin: Box::new(io::empty()), stdout: &mut out, stderr: &mut stderr };
        let script = "sleep 60 & trap 'exit 5' TERM; echo $!; wait";
        connection.run(shell(script), streams, |handle| tell.send(handle).unwrap())
    });
    let sleep = first_line(here);
    told.recv().unwrap().signal(15);
    assert_eq!(command.join().unwrap().unwrap(), Exit::Status(5));
    eventually("the sleep is hit too", || is_dead(&sleep));
}

fn first_line(mut from: impl Read) -> String {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        from.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

#[test]
fn a_client_that_disconnects_takes_the_command_with_it() {
    let server = server();
    let (tell, told) = channel();
    let (here, mut out) = io::pipe().unwrap();
    let connection = connect(&server);
    let command = thread::spawn(move || {
        let mut stderr = Vec::new();
        let streams =
            Streams { stdin: Box::new(io::empty()), stdout: &mut out, stderr: &mut stderr };
        let script = "trap '' TERM HUP INT; sleep 60 & echo $!; wait";
        connection.run(shell(script), streams, |handle| tell.send(handle).unwrap())
    });
    let sleep = first_line(here);
    told.recv().unwrap().disconnect();
    assert!(matches!(command.join().unwrap(), Err(AgentError::Ended)));
    eventually("the group is killed", || is_dead(&sleep));
    // While the command is stuck in its output as well.
    let mut raw = Raw::agreed(&server);
    raw.send(&Frame::Request(Request::Run(shell("echo $$ >&2; exec yes"))));
    let Frame::Data(Stream::Stderr, pid) =
        raw.until(|f| matches!(f, Frame::Data(Stream::Stderr, _)))
    else {
        unreachable!()
    };
    drop(raw);
    eventually("yes is killed", || is_gone(text(&pid)));
}

#[test]
fn fifty_at_once_and_no_zombies() {
    let server = server();
    let commands: Vec<_> = (0..50)
        .map(|number| {
            let connection = connect(&server);
            thread::spawn(move || {
                let input = noise(300_000 + number);
                let script = format!("echo $$ >&2; cat; exit {number}");
                let ran =
                    run_with(connection, shell(&script), io::Cursor::new(input.clone()), |_| {});
                assert_eq!(ran.exit.unwrap(), Exit::Status(u8::try_from(number).unwrap()));
                assert!(ran.stdout == input, "command {number}");
                text(&ran.stderr).to_owned()
            })
        })
        .collect();
    for command in commands {
        let pid = command.join().unwrap();
        assert!(is_gone(&pid), "process {pid} was not reaped");
    }
}

#[test]
fn too_many_are_refused() {
    let server = server();
    let held: Vec<_> = (0..CONNECTIONS).map(|_| connect(&server)).collect();
    let refused = connect(&server).modules().unwrap_err();
    assert!(refused.to_string().contains("64 connections already"), "{refused}");
    drop(held);
    eventually("there is room again", || connect(&server).modules().is_ok());
}

#[test]
fn modules_lists_and_files() {
    let server = server();
    let ours = fs::read_to_string("/proc/modules").map_or(0, |text| text.lines().count());
    assert_eq!(connect(&server).modules().unwrap().len(), ours);

    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().as_bytes().to_vec();
    let content = noise(5_000_001);
    fs::write(dir.path().join("big"), &content).unwrap();
    fs::create_dir(dir.path().join("a\nb")).unwrap();
    std::os::unix::fs::symlink("nowhere", dir.path().join("link")).unwrap();
    let list = |what: &[u8]| {
        let mut entries = Vec::new();
        let listed = connect(&server).list(what, |entry| {
            entries.push((entry.mode & 0o170_000, String::from_utf8(entry.name).unwrap()));
            Ok(())
        });
        listed.map(|()| entries)
    };
    let expected = [(0o040_000, "a\nb"), (0o100_000, "big"), (0o120_000, "link")];
    assert_eq!(list(&path("")).unwrap(), expected.map(|(mode, name)| (mode, name.to_owned())));
    assert_eq!(list(&path("big")).unwrap().len(), 1);
    assert!(
        list(&path("none"))
            .unwrap_err()
            .to_string()
            .ends_with("none: No such file or directory (os error 2)")
    );

    let fetch = |what: &[u8]| {
        let mut bytes = Vec::new();
        connect(&server).fetch(what, &mut bytes).map(|entry| (entry.size, bytes))
    };
    assert!(fetch(&path("big")).unwrap() == (5_000_001, content));
    assert!(text(&fetch(b"/proc/self/status").unwrap().1).contains("\nPid:\t"));
    let error = |what: &[u8]| fetch(what).unwrap_err().to_string();
    assert!(error(&path("none")).contains("No such file"));
    assert!(error(&path("")).contains("is a directory"));
    // To open it would wait for a writer.
    let fifo = dir.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    assert!(error(&path("fifo")).contains("not a regular file"));
}

#[test]
fn other_versions_are_refused_by_name() {
    let later = Hello { versions: (2, 4), software: "vmtrace-agent 9.1".to_owned() };
    let (here, there) = UnixStream::pair().unwrap();
    server().with_hello(later).attend(there.into());
    let error = Connection::new(here.into()).unwrap_err().to_string();
    let ours = concat!("vmtrace ", env!("CARGO_PKG_VERSION"), " (agent protocol 1)");
    assert!(
        error.contains("vmtrace-agent 9.1 (agent protocol 2 to 4)") && error.contains(ours),
        "{error}"
    );

    // One that speaks ours too is fine.
    let both = Hello { versions: (1, 4), software: "vmtrace-agent 9.1".to_owned() };
    let server = server().with_hello(both.clone());
    let connection = connect(&server);
    assert_eq!(connection.agent(), &both);
    connection.modules().unwrap();
}

/// One side of a connection, which says anything.
struct Raw(UnixStream, Decoder);

impl Raw {
    fn pair() -> (Self, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        (Self(here, Decoder::new()), there)
    }

    /// A client that has said hello.
    fn agreed(server: &Server) -> Self {
        let (mut raw, there) = Self::pair();
        server.attend(there.into());
        raw.0.write_all(&Hello::new("raw").encode()).unwrap();
        raw.fill();
        while raw.1.hello().unwrap().is_none() {
            raw.fill();
        }
        raw
    }

    fn send(&mut self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes).unwrap();
        // The server may have had enough.
        let _ = self.0.write_all(&bytes);
    }

    fn fill(&mut self) -> usize {
        let mut bytes = [0; 4096];
        let count = self.0.read(&mut bytes).unwrap();
        self.1.push(&bytes[..count]);
        count
    }

    fn until(&mut self, wanted: impl Fn(&Frame) -> bool) -> Frame {
        loop {
            while let Some(frame) = self.1.frame().unwrap() {
                if wanted(&frame) {
                    return frame;
                }
            }
            assert_ne!(self.fill(), 0, "the connection has ended");
        }
    }

    /// Why the request was refused.
    fn refusal(&mut self) -> String {
        match self.until(|frame| matches!(frame, Frame::Failed(_) | Frame::Exited(_))) {
            Frame::Failed(failure) => failure.text,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_hostile_client_is_refused() {
    let server = server();
    let refused = |frames: &[Frame]| {
        let mut raw = Raw::agreed(&server);
        frames.iter().for_each(|frame| raw.send(frame));
        raw.refusal()
    };
    let sleep = || Frame::Request(Request::Run(program(&["sleep", "60"])));
    let not_expected =
        "the other side does not speak the agent protocol: a frame that was not expected";
    assert_eq!(refused(&[Frame::Done]), not_expected);
    for frame in [
        sleep(),
        Frame::Exited(Exit::Status(0)),
        Frame::Stop(Stream::Stdin),
        Frame::Data(Stream::Stdout, vec![1]),
        Frame::Credit(Stream::Stdin, 1),
        Frame::Credit(Stream::Stdout, u32::MAX),
    ] {
        assert_eq!(refused(&[sleep(), frame.clone()]), not_expected, "{frame:?}");
    }
    assert!(refused(&[sleep(), Frame::Signal(200)]).contains("a signal that does not exist"));
    let end = [sleep(), Frame::End(Stream::Stdin), Frame::Data(Stream::Stdin, vec![1])];
    assert!(refused(&end).contains("more standard input than was agreed to"));
    // It reads nothing: what is sent beyond the window is refused, not kept.
    let full = Frame::Data(Stream::Stdin, vec![1; 1 << 14]);
    let mut flood = vec![sleep()];
    flood.extend(vec![full; usize::try_from(WINDOW).unwrap() / (1 << 14) + 5]);
    assert!(refused(&flood).contains("more standard input than was agreed to"));

    let mut raw = Raw::agreed(&server);
    raw.0.write_all(&[0xff; 5]).unwrap();
    assert!(raw.refusal().contains("longer than 256 KiB"));
    let (mut raw, there) = Raw::pair();
    server.attend(there.into());
    raw.0.write_all(b"GET / HTTP/1.1\r\n").unwrap();
    eventually("the connection is ended", || raw.fill() == 0);
    // The server goes on.
    assert_eq!(run(&server, shell("exit 1")).exit.unwrap(), Exit::Status(1));
}

/// What the client says of an agent that sends `frames` whatever the request.
fn hostile<T>(
    request: impl FnOnce(Connection) -> Result<T, AgentError>,
    frames: &[Frame],
    end: &[u8],
) -> AgentError {
    let (Raw(mut agent, _), there) = Raw::pair();
    let mut bytes = Hello::new("raw").encode();
    frames.iter().for_each(|frame| frame.encode(&mut bytes).unwrap());
    bytes.extend(end);
    thread::scope(|scope| {
        scope.spawn(move || {
            // The client may have had enough before it has everything.
            let _ = agent.write_all(&bytes);
            while matches!(agent.read(&mut [0; 4096]), Ok(1..)) {}
        });
        request(Connection::new(there.into()).unwrap()).err().unwrap()
    })
}

#[test]
fn a_hostile_agent_is_noticed() {
    fn run(connection: Connection) -> Result<Exit, AgentError> {
        // One output takes nothing.
        let (mut stdout, mut stderr) = (Vec::new(), Fails(io::ErrorKind::Other));
        let streams =
            Streams { stdin: Box::new(io::empty()), stdout: &mut stdout, stderr: &mut stderr };
        connection.run(shell(""), streams, |_| {})
    }
    fn fetch(connection: Connection) -> Result<(), AgentError> {
        connection.fetch(b"x", &mut Vec::new()).map(drop)
    }
    for frames in [
        vec![Frame::Data(Stream::Stdin, vec![1])],
        vec![Frame::Credit(Stream::Stdout, 1)],
        vec![Frame::Credit(Stream::Stdin, u32::MAX); 2],
        vec![Frame::Stop(Stream::Stdout)],
        vec![Frame::Done],
        vec![Frame::Request(Request::Modules)],
        vec![Frame::Data(Stream::Stderr, vec![1; 30_000]); 10],
    ] {
        assert!(matches!(hostile(run, &frames, b""), AgentError::Protocol(_)), "{frames:?}");
    }
    let strange =
        |error: AgentError| assert!(matches!(error, AgentError::Protocol(_)), "{error:?}");
    strange(hostile(Connection::modules, &[], &[0xff; 9]));
    strange(hostile(Connection::modules, &[Frame::Signal(1)], b""));
    strange(hostile(fetch, &[Frame::Data(Stream::Stdout, vec![1])], b""));
    let (Raw(mut agent, _), there) = Raw::pair();
    agent.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap();
    strange(Connection::new(there.into()).unwrap_err());
    let (Raw(mut agent, _), there) = Raw::pair();
    agent.write_all(b"VMTAG").unwrap();
    agent.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(matches!(Connection::new(there.into()), Err(AgentError::Ended)));
}
