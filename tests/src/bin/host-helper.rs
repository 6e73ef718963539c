//! A program for the tests of jobs. It runs inside the emulated host; its arguments say what it does.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use vmtrace_tests::soak::{LOOK, Look};

/// Bytes moved at a time.
const BLOCK: usize = 64 << 10;
/// A run of vmtrace, which has a limit of 240 s, hangs if it takes longer.
const PATIENCE: Duration = Duration::from_secs(400);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["exit", code] => return ExitCode::from(number::<u8>(code)),
        ["say", out, err] => {
            println!("{out}");
            eprintln!("{err}");
        }
        ["say-and-sleep", text] => {
            println!("{text}");
            std::thread::sleep(Duration::from_secs(600));
        }
        ["env", name] => println!("{}", std::env::var(name).unwrap_or_default()),
        ["drain"] => drop(std::io::copy(&mut std::io::stdin(), &mut std::io::sink())),
        ["socket-bytes", count] => socket_bytes(number(count)),
        ["bytes", path, count] => bytes(path, number(count)),
        ["cat"] => drop(std::io::copy(&mut std::io::stdin(), &mut std::io::stdout())),
        ["read", path] => {
            print!("{}", std::fs::read_to_string(path).unwrap_or_else(|e| e.to_string()));
        }
        ["run", path] => {
            println!("{:?}", Command::new(path).args(["exit", "9"]).status().map(|s| s.code()));
        }
        ["write", path, text] => std::fs::write(path, text).unwrap(),
        ["abort"] => std::process::abort(),
        ["sleep", ms] => std::thread::sleep(Duration::from_millis(number(ms))),
        // Writes until nobody reads them any more; says so on standard error.
        ["flood", bytes] => {
            let mut left: u64 = number(bytes);
            let block: Vec<u8> = (0..=255).cycle().take(1 << 16).collect();
            let mut out = std::io::stdout();
            while left > 0 {
                let n = usize::try_from(left).unwrap_or(usize::MAX).min(block.len());
                if let Err(e) = out.write_all(&block[..n]) {
                    eprintln!("{:?}", e.kind());
                    return ExitCode::from(3);
                }
                left -= n as u64;
            }
        }
        ["flood-and-say", text] => {
            let say = (*text).to_owned();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(300));
                eprintln!("{say}");
            });
            // Blocks: the reader takes nothing until it saw the text.
            std::io::stdout().write_all(&vec![b'x'; 8 << 20]).unwrap();
        }
        // Leaves a child behind that holds the output open.
        ["leave"] => {
            let me = std::env::current_exe().unwrap();
            drop(Command::new(me).args(["sleep", "600000"]).stdin(Stdio::null()).spawn());
            println!("left");
        }
        // vmtrace with these arguments: what each of its threads was last seen to be confined to.
        ["threads", args @ ..] => return threads(args),
        // vmtrace with these arguments: what it holds, whenever standard input asks for it.
        ["watch", args @ ..] => return watch(args),
        // Two programs at a time, each with its arguments; both must succeed.
        ["beside", both @ ..] => return beside(both),
        // A program with a guest that works on a disk: how often that leaves KVM meanwhile.
        ["exits", program, args @ ..] => return exits(program, args),
        ["ignore-sigint"] => {
            let _taken = vmtrace::emulated::Interrupts::install();
            println!("ready");
            std::thread::sleep(Duration::from_secs(600));
        }
        ["processes"] => {
            for entry in std::fs::read_dir("/proc").unwrap().flatten() {
                if entry.file_name().to_string_lossy().parse::<u32>().is_ok()
                    && let Ok(name) = std::fs::read_to_string(entry.path().join("comm"))
                {
                    print!("{name}");
                }
            }
        }
        _ => return ExitCode::from(99),
    }
    ExitCode::SUCCESS
}

fn consume(mut stream: UnixStream) -> u64 {
    let (mut buffer, mut total) = (vec![0; BLOCK], 0);
    loop {
        match stream.read(&mut buffer).unwrap() {
            0 => return total,
            count => total += count as u64,
        }
    }
}

fn produce(mut stream: &UnixStream, count: u64) {
    let block = vec![0; BLOCK];
    for _ in 0..count / BLOCK as u64 {
        stream.write_all(&block).unwrap();
    }
    stream.shutdown(Shutdown::Write).unwrap();
}

/// Bytes from a thread to another through a Unix socket, and how long they take.
fn socket_bytes(count: u64) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let start = Instant::now();
    let producer = std::thread::spawn(move || produce(&theirs, count));
    assert_eq!(consume(ours), count);
    println!("unix-socket-nanoseconds {}", start.elapsed().as_nanos());
    producer.join().unwrap();
}

/// Takes so many bytes from the first who connects to the socket and gives them to the second.
fn bytes(path: &str, count: u64) {
    let listener = UnixListener::bind(path).unwrap();
    let (stream, _) = listener.accept().unwrap();
    let start = Instant::now();
    assert_eq!(consume(stream), count);
    println!("guest-to-host-nanoseconds {}", start.elapsed().as_nanos());
    let (stream, _) = listener.accept().unwrap();
    let start = Instant::now();
    produce(&stream, count);
    // It is closed when all of it was read.
    consume(stream);
    println!("host-to-guest-nanoseconds {}", start.elapsed().as_nanos());
}

/// Exits of all guests that there are, by KVM's own count.
fn exit_count() -> u64 {
    let count = std::fs::read_to_string("/sys/kernel/debug/kvm/exits");
    count.ok().and_then(|count| count.trim().parse().ok()).expect("KVM counts exits")
}

/// Runs a program whose guest says when it begins and ends, and ends it when the guest has said all; prints what it says.
fn exits(program: &str, args: &[&str]) -> ExitCode {
    // It may be there.
    let flags = nix::mount::MsFlags::empty();
    let _ = nix::mount::mount(
        Some("debugfs"),
        "/sys/kernel/debug",
        Some("debugfs"),
        flags,
        None::<&str>,
    );
    let (reader, writer) = std::io::pipe().unwrap();
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(writer.try_clone().unwrap()).stderr(writer);
    let mut child = command.spawn().unwrap();
    drop(command);
    let mut begun = None;
    for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        println!("{}", line.trim_end());
        if line.contains("disk begins") {
            begun = Some(exit_count());
        } else if line.contains("disk ends") {
            println!("exits {}", exit_count() - begun.expect("it has begun"));
        } else if line.contains("disk-hash") {
            let _ = child.kill();
        }
    }
    let _ = child.wait();
    if begun.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn beside(both: &[&str]) -> ExitCode {
    let mut halves = both.split(|arg| *arg == "--");
    let (Some([first, first_args @ ..]), Some([second, second_args @ ..]), None) =
        (halves.next(), halves.next(), halves.next())
    else {
        return ExitCode::from(99);
    };
    let start = |name: &str, args: &[&str]| Command::new(name).args(args).spawn().unwrap();
    let mut running = [start(first, first_args), start(second, second_args)];
    loop {
        let ends: Vec<_> = running.iter_mut().map(|child| child.try_wait().unwrap()).collect();
        if let Some(status) = ends.iter().flatten().find(|status| !status.success()) {
            eprintln!("a program beside another failed: {status}");
            for child in &mut running {
                let _ = child.kill();
                child.wait().unwrap();
            }
            return ExitCode::FAILURE;
        }
        if ends.iter().all(Option::is_some) {
            return ExitCode::SUCCESS;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn number<T: std::str::FromStr>(text: &str) -> T {
    text.parse().unwrap_or_else(|_| panic!("{text} is not a number"))
}

/// Where each thread of a process that hangs is.
fn tell_where(directory: &str) {
    for thread in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let read = |name: &str| std::fs::read_to_string(thread.path().join(name));
        for name in ["comm", "wchan", "syscall", "stack"] {
            eprintln!("hangs: {} {}", name, read(name).unwrap_or_default().trim());
        }
    }
}

/// Looks at the threads of vmtrace until it ends. A line for each: its name, and of its status the
/// lines for `Seccomp`, `Seccomp_filters`, `NoNewPrivs` and `CapEff`.
fn threads(args: &[&str]) -> ExitCode {
    let mut child = Command::new("/init").arg0("vmtrace").args(args).spawn().unwrap();
    let directory = format!("/proc/{}/task", child.id());
    let mut seen = BTreeMap::new();
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begin.elapsed() > PATIENCE {
            tell_where(&directory);
            child.kill().unwrap();
            child.wait().unwrap();
            return ExitCode::from(254);
        }
        for thread in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            let Ok(status) = std::fs::read_to_string(thread.path().join("status")) else {
                continue;
            };
            let field = |name: &str| {
                let mut lines = status.lines();
                let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
                value.unwrap_or("?").trim().to_owned()
            };
            // Of one that is ending there may be nothing left.
            if !status.is_empty() {
                let fields = ["Name", "Seccomp", "Seccomp_filters", "NoNewPrivs", "CapEff"];
                seen.insert(thread.file_name(), fields.map(field).join(" "));
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    seen.values().for_each(|line| println!("{line}"));
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(255))
}

/// Runs vmtrace, whose standard input gets all lines of ours but those that ask for a look at it. These are answered on
/// standard output, which vmtrace's is not.
fn watch(args: &[&str]) -> ExitCode {
    let mut command = Command::new("/init");
    command.arg0("vmtrace").args(args).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    let (pid, mut input) = (child.id(), child.stdin.take().unwrap());
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if line.starts_with(LOOK) {
                match Look::at(pid) {
                    Ok(look) => println!("{line} {look}"),
                    Err(error) => println!("{line} {error:#}"),
                }
            } else if writeln!(input, "{line}").is_err() {
                return;
            }
        }
    });
    let status = child.wait().unwrap();
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(255))
}
