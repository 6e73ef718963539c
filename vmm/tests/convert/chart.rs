//! Flame charts in a browser: headless Chromium, of `images/readers`.

use serde_json::{Value, json};
use vmtrace::stream::{
    EntryRecord, Header, Mark, MarkKind, RecordBuffer, ReturnRecord, Summary, Symbol, Task, Writer,
};

use super::{BASE, Folder, KSYS_READ, VFS_READ, reader, stream};

/// What a person does, and sees.
const HANDS: &str = r"
const get = (id) => document.getElementById(id);
const frame = () => new Promise((done) => setTimeout(done, 20));
const calls = () => [...document.querySelectorAll('.call')];
const shown = () => calls().map((it) => it.getBBox()).map((box) => [box.x, box.y, box.width].map(Math.round));
const texts = (what) => [...document.querySelectorAll(what)].map((it) => it.textContent);
const mouse = (kind, element, x, y) => element.dispatchEvent(
  new MouseEvent(kind, { bubbles: true, cancelable: true, button: 0, clientX: x, clientY: y }));
const middle = (element) => {
  const box = element.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
};
const point = (element) => { mouse('mousemove', element, ...middle(element)); return get('tip').textContent; };
const click = (element) => { for (const kind of ['mousedown', 'mouseup']) mouse(kind, element, ...middle(element)); return frame(); };
const seek = (text) => { get('search').value = text; get('search').dispatchEvent(new Event('input')); return frame(); };
";

/// Opens a page and lets a script do something there; returns what that gives.
fn browse(folder: &Folder, page: &str, script: &str) -> Value {
    let html = folder.read(page);
    // Without a screen there are not always frames; time goes on.
    let frames = "<body><script>requestAnimationFrame = (draw) => setTimeout(draw, 1)</script>";
    let html = html.replace("<body>", frames);
    let end = "</body>\n</html>\n";
    let html = html.strip_suffix(end).expect("a whole page");
    let script = format!(
        "<pre id=\"result\"></pre><script>{HANDS}
         (async () => {{ {script} }})().catch((error) => ({{ error: String(error) }})).then((result) => {{
           const bytes = new TextEncoder().encode(JSON.stringify(result));
           get('result').textContent = Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
         }});</script>"
    );
    let path = folder.path(&format!("{page}.test.html"));
    std::fs::write(&path, format!("{html}{script}{end}")).expect("room");
    let mut chromium = reader("chromium-headless-shell");
    // Tests run as root in containers, where its sandbox cannot; time is the page's own.
    chromium.args([
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1000,700",
    ]);
    chromium.args(["--virtual-time-budget=60000", "--dump-dom"]);
    let mut home = std::ffi::OsString::from("--user-data-dir=");
    home.push(folder.path("chromium"));
    chromium.arg(home).arg(&path);
    let output = chromium.output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {said}", output.status);
    let page = String::from_utf8(output.stdout).expect("UTF-8");
    let (_, result) = page.rsplit_once("<pre id=\"result\">").expect("a result");
    let (hex, _) = result.split_once("</pre>").expect("its end");
    let bytes: Vec<_> = (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex"))
        .collect();
    assert!(!bytes.is_empty(), "the script has not ended: {page} {said}");
    let result: Value = serde_json::from_slice(&bytes).expect("JSON");
    assert_eq!(result.get("error"), None, "{result}");
    result
}

#[test]
fn draws_zooms_and_searches() {
    let folder = Folder::new(&stream());
    let said = folder.convert(&["-o", "out.html"]);
    for note in [
        "note: html: 1 entries without a recorded return: shown as ticks; boot with --graph",
        "note: html: 1 calls without a return: shown with a dashed line",
    ] {
        assert!(said.contains(note), "{note}: {said}");
    }
    let script = r"
        const view = () => get('view').textContent;
        const named = (name) => calls().find((it) => point(it).startsWith(name + '\n'));
        const seen = { tasks: texts('.task'), notes: texts('#notes li'), all: view() };
        seen.losses = document.querySelectorAll('svg rect.loss').length;
        seen.open = document.querySelectorAll('.open').length;
        await click(calls()[0]);
        seen.clicked = view();
        seen.shown = shown();
        seen.names = texts('.name');
        seen.tips = ['vfs_read', 'timer_tick', 'ext4_read [ext4]'].map((name) => point(named(name)));
        const box = get('chart').getBoundingClientRect();
        mouse('mousedown', get('chart'), box.x + box.width / 4, 300);
        mouse('mousemove', get('chart'), box.x + box.width / 2, 300);
        seen.range = Math.round(get('range').getBBox().width / box.width * 100);
        mouse('mouseup', get('chart'), box.x + box.width / 2, 300);
        await frame();
        seen.dragged = view();
        get('out').click();
        await frame();
        seen.wider = view();
        get('reset').click();
        await frame();
        seen.reset = view();
        seen.searches = [];
        for (const text of ['READ', '/^(k|ext)/', 'none', '/(/', '']) {
          await seek(text);
          seen.searches.push([get('found').textContent, document.querySelectorAll('rect.hit').length]);
        }
        return seen;
    ";
    let seen = browse(&folder, "out.html", script);
    assert_eq!(seen["tasks"], json!(["dd-42", "dd worker-43"]));
    let notes = seen["notes"].to_string();
    assert!(notes.contains("123 records were lost: calls are missing"), "{notes}");
    assert!(notes.contains("1 entries have no recorded return"), "{notes}");
    // A line through all lanes, and what is pointed at.
    assert_eq!((&seen["losses"], &seen["open"]), (&json!(2), &json!(1)));
    let starts = |key: &str, text: &str| {
        let view = seen[key].as_str().expect("a text");
        assert!(view.starts_with(text), "{key}: {view}");
    };
    starts("all", "0.000001000 s to 0.950000000 s: 949.999 ms; ");
    starts("clicked", "0.001000000 s to 0.002400000 s: 1.400 ms");
    assert_eq!(seen["names"], json!(["ksys_read", "vfs_read", "ext4_read [ext4]"]));
    // By depth, and as long as they took.
    let shown: Vec<Vec<i64>> = serde_json::from_value(seen["shown"].clone()).expect("numbers");
    let wide = shown[0][2];
    let near = |x: i64, us: i64| (x - us * wide / 1400).abs() <= 1;
    assert!(shown[0][0] == 0 && wide > 800, "{shown:?}");
    assert!(near(shown[1][0], 2) && near(shown[1][2], 502), "{shown:?}");
    assert!(shown[0][1] < shown[1][1] && shown[1][1] < shown[3][1], "{shown:?}");
    assert!(near(shown[3][0], 4) && near(shown[3][2], 500), "{shown:?}");
    let tips = [
        "vfs_read\nduration: 502.000 us\nfrom 0.001002000 s\nto   0.001504000 s\ntask dd-42, vCPU 0, depth 1",
        "timer_tick\nduration: not recorded (boot with --graph)\nfrom 0.001003000 s\ntask dd-42, vCPU 0, depth 2",
        "ext4_read [ext4]\nduration: 500.000 us\nfrom 0.001004000 s\nto   0.001504000 s\ntask dd-42, vCPU 0, depth 2",
    ];
    assert_eq!(seen["tips"], json!(tips));
    assert_eq!(seen["range"], json!(25));
    // As near as pixels are.
    let about = |key: &str, from_us: f64, to_us: f64| {
        let view = seen[key].as_str().expect("a text");
        let times: Vec<f64> = view.split(' ').filter_map(|word| word.parse().ok()).collect();
        let near = |time: f64, us: f64| (time * 1e6 - us).abs() < 2.0;
        assert!(near(times[0], from_us) && near(times[1], to_us), "{key}: {view}");
    };
    about("dragged", 1350.0, 1700.0);
    about("wider", 1175.0, 1875.0);
    assert_eq!(seen["reset"], seen["all"]);
    let searches = json!([
        ["5 calls of 3 functions, 52.403 ms together", 5],
        ["2 calls of 2 functions, 1.900 ms together", 2],
        ["0 calls of 0 functions", 0],
        ["not an expression: Invalid regular expression: /(/i: Unterminated group", 0],
        ["", 0],
    ]);
    assert_eq!(seen["searches"], searches);
}

// A guest names its functions, modules and tasks as it likes.
#[test]
fn names_are_never_markup() {
    const EVIL: [&str; 4] = [
        "</script><script>window.hacked = 1</script>",
        "<img src=x onerror=window.hacked=2>",
        "\"'&lt;<!--<script>${window.hacked=3}\u{2028}",
        "]]></svg><a href=javascript:window.hacked=4>",
    ];
    let header = Header {
        clock_hz: 1_000_000_000,
        vcpus: 1,
        address_base: Header::TOP_4_GIB,
        release: EVIL[0].into(),
        arch: EVIL[1].into(),
        vmtrace_version: EVIL[1].into(),
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    for (number, name) in (0..).zip(EVIL) {
        let module = if number % 2 == 0 { "" } else { EVIL[0] };
        let address = BASE + number * 0x100;
        writer.symbols([Symbol { address, size: 0x100, name, module }]).expect("room");
    }
    writer.task(Task::new(5, 5, b"</script><b>")).expect("memory");
    let sp = 0xffff_c900_0000_3ff0;
    let mut buffer = RecordBuffer::new();
    let function = |number: u32| KSYS_READ + number * 0x100;
    for number in 0..4 {
        let (at, sp) = (u64::from(number) * 10, sp - u64::from(number) * 8);
        buffer.push_frame(EntryRecord::new(at, function(number), 0, 5).with_sp(sp));
    }
    for number in (0..4).rev() {
        let (at, sp) = (1000 - u64::from(number), sp - u64::from(number) * 8);
        buffer.push_return(ReturnRecord::new(at, function(number), 0, 5, sp));
    }
    writer.records(0, &buffer).expect("vCPU");
    let mark = Mark { ticks: 5, kind: MarkKind::Console, duration_ns: 0, text: EVIL[1].into() };
    writer.mark(&mark).expect("memory");
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    folder.convert(&["-o", "out.html"]);
    let page = folder.read("out.html");
    assert_eq!(page.matches("<script").count(), 2, "its data and its script");
    assert_eq!(page.matches("</script").count(), 2);
    assert!(!page.contains("<img") && !page.contains("<a "), "{page}");
    let script = r"
        await seek('hacked');
        const tips = calls().map(point).map((text) => text.split('\n')[0]);
        const mark = point(document.querySelector('svg rect.mark'));
        const links = document.querySelectorAll('img, a, iframe, svg a').length;
        return { tips, mark, links, hacked: window.hacked ?? null, tasks: texts('.task'),
                 found: get('found').textContent, title: document.title };
    ";
    let seen = browse(&folder, "out.html", script);
    let module = EVIL[0];
    let names = [
        EVIL[0].to_owned(),
        format!("{} [{module}]", EVIL[1]),
        EVIL[2].to_owned(),
        format!("{} [{module}]", EVIL[3]),
    ];
    assert_eq!(seen["tips"], json!(names));
    assert_eq!((&seen["hacked"], &seen["links"]), (&Value::Null, &json!(0)));
    assert_eq!(seen["tasks"], json!(["</script><b>-5"]));
    assert!(seen["found"].as_str().expect("a text").starts_with("4 calls of 4 functions"));
    assert!(seen["mark"].as_str().expect("a text").contains(EVIL[1]), "{seen}");
    assert_eq!(seen["title"], json!(format!("Flame chart: Linux {} ({})", EVIL[0], EVIL[1])));
}

// A page has room for so many; what is not there is said in it and on standard error.
#[test]
fn large_traces_are_cut_and_say_so() {
    let header = Header {
        clock_hz: 1_000_000_000,
        vcpus: 1,
        address_base: Header::TOP_4_GIB,
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    writer.symbols([Symbol::new(BASE, 0x100, "ksys_read")]).expect("room");
    writer.symbols([Symbol::new(BASE + 0x100, 0x100, "vfs_read")]).expect("room");
    let sp = 0xffff_c900_0000_3ff0;
    let mut buffer = RecordBuffer::new();
    for number in 0..150_000_u64 {
        let at = number * 1000;
        buffer.push_frame(EntryRecord::new(at, KSYS_READ, 0, 5).with_sp(sp));
        buffer.push_frame(EntryRecord::new(at + 1, VFS_READ, 0, 5).with_sp(sp - 8));
        buffer.push_return(ReturnRecord::new(at + 10 + number % 90, VFS_READ, 0, 5, sp - 8));
        buffer.push_return(ReturnRecord::new(at + 900, KSYS_READ, 0, 5, sp));
        if buffer.len() >= 4096 {
            writer.records(0, &buffer).expect("vCPU");
            buffer.clear();
        }
    }
    writer.records(0, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    let said = folder.convert(&["-o", "out.html"]);
    let note = "200000 calls of at most 900 ns: left out, the page has room for the 100000 longest";
    assert!(said.contains(&format!("note: html: {note}\n")), "{said}");
    assert!(folder.path("out.html").metadata().expect("there").len() < 4_000_000);
    let script = r"
        await seek('ksys');
        return { notes: texts('#notes li'), found: get('found').textContent, drawn: calls().length };
    ";
    let seen = browse(&folder, "out.html", script);
    assert_eq!(seen["notes"], json!([note]));
    assert_eq!(seen["found"], json!("100000 calls of 1 functions, 90.000 ms together"));
    // A window is a thousand pixels wide.
    assert!((100..2100).contains(&seen["drawn"].as_u64().expect("a number")), "{seen}");
}

#[test]
fn without_returns_it_says_how_to_get_them() {
    let folder = Folder::new(&stream());
    folder.convert(&["-o", "out.html", "-f", "timer_tick"]);
    let script = "return { notes: texts('#notes li'), tip: point(calls()[0]) };";
    let seen = browse(&folder, "out.html", script);
    let notes = seen["notes"].to_string();
    assert!(notes.contains("No returns were recorded, so it is not known how long"), "{notes}");
    assert!(notes.contains("boot with --graph"), "{notes}");
    assert!(
        seen["tip"].as_str().expect("a text").starts_with("timer_tick\nduration: not recorded")
    );
}

// Both looks have text that can be read on what is behind it.
#[test]
fn follows_light_and_dark() {
    let folder = Folder::new(&stream());
    folder.convert(&["-o", "out.html"]);
    let script = r"
        const rule = [...document.styleSheets[0].cssRules].find((it) => it.media);
        const look = () => { const { color, backgroundColor } = getComputedStyle(document.body); return [color, backgroundColor]; };
        const light = look();
        rule.media.mediaText = 'all';
        return { light, dark: look() };
    ";
    let seen = browse(&folder, "out.html", script);
    assert_eq!(seen["light"], json!(["rgb(27, 27, 27)", "rgb(255, 255, 255)"]));
    assert_eq!(seen["dark"], json!(["rgb(230, 230, 230)", "rgb(22, 24, 28)"]));
    assert!(folder.read("out.html").contains("@media (prefers-color-scheme: dark)"));
}
