//! What the threads of a job do that has to be killed: why it does not end is nowhere else to be seen.

use std::fs::{self, DirEntry};
use std::path::Path;

use nix::unistd::Pid;

/// Functions of a thread's stack that are shown: where it waits, and for whom.
const FRAMES: usize = 6;
/// Threads that are told of; the log's end has room for so many.
const THREADS: usize = 20;

/// A line for each thread. The process may be gone already.
pub(super) fn states(pid: Pid) -> Vec<String> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let number = |task: &DirEntry| task.file_name().to_str().and_then(|it| it.parse::<u32>().ok());
    let mut tasks: Vec<_> = tasks.flatten().map(|task| (number(&task), task.path())).collect();
    // The oldest first.
    tasks.sort();
    let rest = tasks.len().saturating_sub(THREADS);
    let mut lines: Vec<String> = tasks.iter().take(THREADS).map(|(_, task)| state(task)).collect();
    if rest > 0 {
        lines.push(format!("and {rest} more threads"));
    }
    lines
}

/// Its name, its state as `ps` shows it, and the functions of the kernel that it is in (proc_pid_stack(5)).
fn state(task: &Path) -> String {
    let read = |name| fs::read_to_string(task.join(name)).unwrap_or_default();
    let (name, stat, stack) = (read("comm"), read("stat"), read("stack"));
    // The name in it may have any characters.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('?');
    let functions: Vec<&str> = stack
        .lines()
        .filter_map(|line| Some(line.split_once("] ")?.1.split('+').next().unwrap_or_default()))
        .take(FRAMES)
        .collect();
    format!("thread {} {state} {}", name.trim_end(), functions.join(" < "))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Without them nobody knows what has kept a job from its end.
    #[test]
    fn each_thread_is_told() {
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let (told, numbers) = std::sync::mpsc::channel();
        let other = std::thread::Builder::new().name("a) R thread".to_owned());
        let other = other.spawn(move || {
            told.send(nix::unistd::gettid()).unwrap();
            receiver.recv()
        });
        let task = format!("/proc/self/task/{}", numbers.recv().unwrap());
        let waits = (0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            state(Path::new(&task)).starts_with("thread a) R thread S")
        });
        drop(sender);
        let _ = other.unwrap().join().unwrap();
        assert!(waits);
        assert!(states(Pid::this()).iter().any(|line| line.starts_with("thread ")));
        assert_eq!(states(Pid::from_raw(i32::MAX)), Vec::<String>::new());
    }
}
