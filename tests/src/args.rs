//! Arguments and returned values: what must hold on every kernel.

use serde_json::Value;
use vmtrace::export::{Json, Player};

use crate::cases::{Guests, value};
use crate::trace::{Trace, missing};

/// All lines of a trace as JSON.
pub fn json(trace: &Trace) -> Vec<Value> {
    let mut lines = Vec::new();
    let mut player = Player::new(Json::new(&mut lines));
    player.push(&trace.stream).unwrap();
    player.finish().unwrap();
    drop(player);
    let lines = lines.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_slice(line).unwrap()).collect()
}

fn of<'a>(
    lines: &'a [Value],
    event: &'a str,
    function: &'a str,
) -> impl Iterator<Item = &'a Value> + Clone {
    lines.iter().filter(move |line| line["event"] == event && line["function"] == function)
}

impl Guests {
    /// A value that is not the one that the function was called with is worse than none.
    pub fn arguments_and_results_are_those_of_the_calls(&self, name: &str) {
        let filter = ["vfs_read", "vfs_write", "alloc_large_system_hash", "hrtimer_start_range_ns"];
        let mut args: Vec<&str> = filter.iter().flat_map(|glob| ["-f", glob]).collect();
        let paths = "vfs_*: name=file->f_path.dentry->d_name.name, user=buf[0], \
                     inode=file->f_inode->i_size, short=file->f_path.dentry->d_name.name:4";
        args.extend(["--args", "--retval", "--arg", paths, "--memory", "1G"]);
        let (finished, trace) = self.run(name, "files", &args);
        let pid = value(&finished, "pid ");
        let lines = json(&trace);
        assert_eq!(missing(&trace.summary), 0, "{name}");

        // By register and through pointers; a file's name is in the direct map.
        let mine = |line: &&Value| line["pid"] == pid;
        let written = of(&lines, "entry", "vfs_write").filter(mine);
        let written = written.filter(|line| line["args"]["name"] == "vmtrace-workload");
        assert_eq!(written.clone().count(), 20, "{name}");
        for line in written {
            let args = &line["args"];
            assert_eq!((&args["count"], &args["inode"]), (&5000.into(), &0.into()), "{line}");
            assert_eq!(args["short"], "vmtr", "{line}");
            // Memory of the process: what is not known to be there is not read.
            assert_eq!((&args["user"], &args["buf"]), (&Value::Null, &Value::Null), "{line}");
            let file = args["file"].as_str().unwrap();
            assert!(file.starts_with("0xff") && file.len() == 18, "{line}");
        }
        for function in ["vfs_read", "vfs_write"] {
            let results = of(&lines, "return", function).filter(mine);
            assert_eq!(results.filter(|line| line["value"] == 5000).count(), 20, "{name}");
        }

        // A string of the image, integers of several sizes, and arguments on the stack.
        let hashes = of(&lines, "entry", "alloc_large_system_hash");
        let mut tcp = hashes.filter(|line| line["args"]["tablename"] == "TCP established");
        let args = &tcp.next().expect("called as the kernel starts")["args"];
        let expected: [(&str, Value); 5] = [
            ("scale", 17.into()),
            ("flags", 0.into()),
            ("_hash_shift", "0x0".into()),
            ("low_limit", 0.into()),
            ("high_limit", (512 << 10).into()),
        ];
        for (parameter, value) in expected {
            assert_eq!(args[parameter], value, "{name}: {args}");
        }

        // By name, as the kernel's own code has it.
        let modes = of(&lines, "entry", "hrtimer_start_range_ns");
        let modes = modes.map(|line| line["args"]["mode"].as_str().unwrap_or("none"));
        assert!(modes.clone().count() > 0, "{name}");
        for mode in modes {
            assert!(mode.starts_with("HRTIMER_MODE_"), "{name}: {mode}");
        }
    }
}
