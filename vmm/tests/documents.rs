//! The documents: every link has a target, every page is linked, and every command has the options that it is shown
//! with.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use assert_cmd::Command;
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

/// It leads to every page of its folder.
const INDEX: &str = "docs/README.md";

fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    root.canonicalize().unwrap()
}

/// What is of interest in a page.
#[derive(Default)]
struct Page {
    links: Vec<String>,
    anchors: BTreeSet<String>,
    code: Vec<String>,
}

impl Page {
    fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap();
        let mut page = Self::default();
        let (mut heading, mut block) = (None::<String>, None::<String>);
        for event in Parser::new_ext(&text, Options::ENABLE_TABLES) {
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    page.links.push(dest_url.into_string());
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    page.anchors.insert(anchor(&heading.take().unwrap_or_default()));
                }
                Event::Start(Tag::CodeBlock(_)) => block = Some(String::new()),
                Event::End(TagEnd::CodeBlock) => page.code.extend(block.take()),
                Event::Text(text) if block.is_some() => {
                    block.iter_mut().for_each(|it| *it += &text);
                }
                Event::Code(code) => {
                    heading.iter_mut().for_each(|it| *it += &code);
                    page.code.push(code.into_string());
                }
                Event::Text(text) => heading.iter_mut().for_each(|it| *it += &text),
                _ => {}
            }
        }
        page
    }
}

/// Of a heading, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// All pages, by their paths from the root.
fn pages() -> BTreeMap<PathBuf, Page> {
    let root = root();
    let mut pages = BTreeMap::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
            // What is built, and what is no part of the tree.
            if name.starts_with('.') || ["target", "dist"].contains(&name.as_str()) {
                continue;
            }
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
            } else if name.ends_with(".md") {
                pages.insert(path.strip_prefix(&root).unwrap().to_owned(), Page::read(&path));
            }
        }
    }
    assert!(pages.len() > 15, "{:?}", pages.keys());
    pages
}

/// Without `..`; `None` leads out of the tree.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => normal.push(name),
            Component::CurDir => {}
            Component::ParentDir => normal.pop().then_some(())?,
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(normal)
}

fn is_elsewhere(link: &str) -> bool {
    link.starts_with("https://") || link.starts_with("http://")
}

// A reader who follows a link finds nothing.
#[test]
fn every_link_leads_somewhere() {
    let (root, pages) = (root(), pages());
    let mut dead = Vec::new();
    for (path, page) in &pages {
        for link in page.links.iter().filter(|link| !is_elsewhere(link)) {
            let (file, fragment) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => Some(path.clone()),
                file => normal(&path.with_file_name("").join(file)),
            };
            let target = target.filter(|target| root.join(target).exists());
            let found = target.is_some_and(|target| match pages.get(&target) {
                Some(page) => fragment.is_empty() || page.anchors.contains(fragment),
                None => fragment.is_empty(),
            });
            if !found {
                dead.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(dead.is_empty(), "{dead:#?}");
}

// What no other page leads to, nobody reads.
#[test]
fn every_page_is_in_the_index() {
    let pages = pages();
    let index = &pages[Path::new(INDEX)];
    let listed: BTreeSet<PathBuf> =
        index.links.iter().filter_map(|link| normal(&Path::new("docs").join(link))).collect();
    let missing: Vec<&PathBuf> = pages
        .keys()
        .filter(|page| page.starts_with("docs") && **page != Path::new(INDEX))
        .filter(|page| !listed.contains(*page))
        .collect();
    assert!(missing.is_empty(), "{INDEX} does not have {missing:?}");
}

/// The options that a subcommand's help has.
fn options(subcommand: &str) -> Option<BTreeSet<String>> {
    let words = subcommand.split(' ');
    let output = Command::cargo_bin("vmtrace").unwrap().args(words).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let part = |c: char| !c.is_ascii_alphanumeric() && c != '-';
    let words = help.split(part).filter(|word| word.starts_with("--"));
    output.status.success().then(|| words.map(str::to_owned).collect())
}

// Who copies a command from a page gets a usage error.
#[test]
fn commands_are_shown_with_options_that_they_have() {
    let mut known: BTreeMap<String, Option<BTreeSet<String>>> = BTreeMap::new();
    let (mut seen, mut wrong) = (0, Vec::new());
    for (path, page) in pages() {
        // It has what was once, and may have another name now.
        if path == Path::new("CHANGELOG.md") {
            continue;
        }
        for line in page.code.iter().flat_map(|code| code.lines()) {
            // Within quotes there are commands of others.
            let line: String = line.split('\'').step_by(2).collect();
            let line = line.split(['|', ';', '&']).next().unwrap_or_default();
            let mut words = line.trim_start_matches("$ ").split_whitespace();
            if words.next() != Some("vmtrace") {
                continue;
            }
            let Some(mut subcommand) = words.next().map(str::to_owned) else { continue };
            let mut words = words.take_while(|word| *word != "--");
            if subcommand == "ctl" {
                let Some(order) = words.nth(1) else { continue };
                subcommand = format!("ctl S {order}");
                if ["event", "latency", "tracer", "trigger"].contains(&order) {
                    subcommand.extend(words.next().into_iter().flat_map(|next| [" ", next]));
                }
            }
            let options = known.entry(subcommand.clone()).or_insert_with(|| options(&subcommand));
            for word in words.filter(|word| word.starts_with("--")) {
                let option: String =
                    word.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
                seen += 1;
                if options.as_ref().is_some_and(|known| !known.contains(&option)) {
                    wrong.push(format!("{}: vmtrace {subcommand} {option}", path.display()));
                }
            }
        }
    }
    assert!(seen > 50, "{seen} options are not all");
    assert!(wrong.is_empty(), "{wrong:#?}");
}
