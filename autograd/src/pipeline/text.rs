//! Schedules as text files: reading and writing.

use super::action::{Action, PASSES_MAX, Schedule};
use shardgrad_dist::{Error, Kind, Result};

/// The comment at the head of a saved file.
const HEADING: &str = "# A pipeline schedule. F forward, B backward, I input and W weight gradients (stage.microbatch),\n\
     # S send and R receive (from>to.microbatch), G reduction of a stage's gradients.\n\
     # Missing transfers and reductions are added.\n";

impl Schedule {
    /// The text of the schedule, which [`Schedule::from_text`] reads: the name, the number of microbatches, the rank of
    /// each stage, then the list of each rank.
    #[must_use]
    pub fn to_text(&self) -> String {
        let stage_ranks: Vec<String> = self.stage_ranks.iter().map(usize::to_string).collect();
        format!(
            "{HEADING}schedule: {}\nmicrobatches: {}\nstages on ranks: {}\n{self}",
            self.name,
            self.num_microbatches,
            stage_ranks.join(" ")
        )
    }

    /// Parses a schedule: lines `schedule: NAME`, `microbatches: N` and `stages on ranks: 0 1 ..` (the rank of each
    /// stage; default: stage i on rank i), and a line `RANK: ACTIONS` for each rank. Further lines of a rank continue
    /// its list. `#` starts a comment. The lists are not verified; see [`Schedule::verify`].
    ///
    /// # Errors
    /// `Kind::Config` with the line and a correction.
    pub fn from_text(text: &str) -> Result<Schedule> {
        let mut read = Reader { name: None, num_microbatches: None, stage_ranks: None, ranks: Vec::new() };
        for (at, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or("").trim();
            if !line.is_empty() {
                read.line(line).map_err(|e| e.detail("line", format!("{}: {line}", at + 1)))?;
            }
        }
        read.finish()
    }
}

/// The parts parsed so far.
struct Reader {
    name: Option<String>,
    num_microbatches: Option<usize>,
    stage_ranks: Option<Vec<usize>>,
    ranks: Vec<Option<Vec<Action>>>,
}

/// The largest rank, count and number of microbatches of a file; a larger number is a typing error.
const RANKS_MAX: usize = 1 << 16;

fn refuse(text: impl Into<String>, help: impl Into<String>) -> Error {
    Error::new(Kind::Config, text.into()).detail("help", help.into())
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<()> {
        let form = "write `schedule: NAME`, `microbatches: N`, `stages on ranks: 0 1 ..`, or a list as in `0: F0.0 B0.0`";
        let (key, rest) =
            line.split_once(':').ok_or_else(|| refuse("a line of a schedule file has no colon", form))?;
        let (key, rest) = (key.trim(), rest.trim());
        let number = |word: &str, help: &str| {
            let read = word.parse::<usize>().ok().filter(|n| *n < RANKS_MAX);
            read.ok_or_else(|| refuse(format!("`{word}` is not a valid number in a schedule file"), help))
        };
        match key {
            "schedule" => once(&mut self.name, rest.to_string(), key),
            "microbatches" => {
                let count = number(rest, "write a whole number, as in `microbatches: 8`")?;
                once(&mut self.num_microbatches, count, key)
            }
            "stages on ranks" => {
                let stage_ranks =
                    rest.split_whitespace().map(|word| number(word, "write ranks, as in `0 1 1 0`"));
                let stage_ranks = stage_ranks.collect::<Result<Vec<usize>>>()?;
                if stage_ranks.is_empty() {
                    return Err(refuse(
                        "a schedule needs at least one stage",
                        "write the rank of each stage, as in `0 1 1 0`",
                    ));
                }
                once(&mut self.stage_ranks, stage_ranks, key)
            }
            rank => {
                let rank = number(rank, form)?;
                let actions = rest.split_whitespace().map(str::parse).collect::<Result<Vec<Action>>>()?;
                self.ranks.resize(self.ranks.len().max(rank + 1), None);
                self.ranks[rank].get_or_insert_with(Vec::new).extend(actions);
                Ok(())
            }
        }
    }

    fn finish(self) -> Result<Schedule> {
        let num_ranks = self.ranks.len();
        if let Some(empty) = self.ranks.iter().position(Option::is_none) {
            let text = format!("a schedule of {num_ranks} ranks has no list for rank {empty}");
            return Err(refuse(text, format!("add a line `{empty}: ..`, empty if the rank has no stage")));
        }
        let ranks: Vec<Vec<Action>> = self.ranks.into_iter().flatten().collect();
        if ranks.iter().all(Vec::is_empty) {
            return Err(refuse(
                "a schedule file has no action",
                "write a list for each rank, as in `0: F0.0 B0.0`",
            ));
        }
        let microbatch = |action: &Action| match *action {
            Action::Send(t) | Action::Receive(t) => Some(t.microbatch),
            Action::WeightGradient { microbatch, .. } => Some(microbatch),
            Action::Reduce { .. } => None,
            other => Schedule::pass(other).map(|(_, microbatch, _)| microbatch),
        };
        let most =
            ranks.iter().flatten().filter_map(microbatch).max().map_or(0, |most| most.saturating_add(1));
        let num_microbatches = self.num_microbatches.unwrap_or(most);
        if num_microbatches == 0 && most > 0 {
            let text = format!("a schedule file says `microbatches: 0`, but its lists use {most}");
            return Err(refuse(text, format!("write `microbatches: {most}`, or leave the line out")));
        }
        if most > RANKS_MAX || num_microbatches == 0 {
            let text = format!("a schedule has {most} microbatches");
            return Err(refuse(text, "microbatches are counted from 0, one after another"));
        }
        let stage_ranks = self.stage_ranks.unwrap_or_else(|| (0..num_ranks).collect());
        if stage_ranks.len().checked_mul(num_microbatches).is_none_or(|n| n > PASSES_MAX) {
            let stages = stage_ranks.len();
            let text = format!(
                "{stages} stages and {num_microbatches} microbatches are too many: lists have at most {PASSES_MAX} forward \
                 passes"
            );
            return Err(refuse(text, "use fewer stages or microbatches"));
        }
        Ok(Schedule {
            name: self.name.unwrap_or_else(|| "own".to_string()),
            num_microbatches,
            stage_ranks,
            ranks,
        })
    }
}

fn once<T>(stage_ranks: &mut Option<T>, value: T, key: &str) -> Result<()> {
    if stage_ranks.replace(value).is_some() {
        return Err(refuse(format!("a schedule file has two lines `{key}`"), "leave one of the lines out"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedule_file_round_trips() {
        let text = "schedule: mine  # of two ranks\nmicrobatches: 2\n\n0: F0.0 F0.1\n0: B0.0 B0.1 G0\n1: F1.0 B1.0 F1.1 B1.1";
        let schedule = Schedule::from_text(text).unwrap();
        assert_eq!((schedule.name.as_str(), schedule.num_microbatches), ("mine", 2));
        assert_eq!(schedule.stage_ranks, [0, 1]);
        let links = [(0, 1)];
        assert_eq!(schedule.with_transfers(&links).verify(&links).unwrap().peak_live, [2, 1]);
        let saved = schedule.with_transfers(&links);
        assert_eq!(Schedule::from_text(&saved.to_text()).unwrap(), saved);
        // Without the head lines: the default name, and as many microbatches as the lists use.
        let bare = Schedule::from_text("0: F0.0 F0.1 F1.0 F1.1\nstages on ranks: 0 0").unwrap();
        assert_eq!((bare.name.as_str(), bare.num_microbatches, bare.stage_ranks.len()), ("own", 2, 2));
    }

    #[test]
    fn invalid_schedule_file_names_line_and_correction() {
        for (text, line, what, help) in [
            ("F0.0 F0.1", Some("1: F0.0 F0.1"), "has no colon", "0: F0.0 B0.0"),
            ("\n0: F0.0 X0.1", Some("2: 0: F0.0 X0.1"), "`X0.1` is not an action", "write F0.3, B0.3"),
            ("zero: F0.0", Some("1: zero: F0.0"), "`zero` is not a valid number", "microbatches: N"),
            ("microbatches: some", Some("1:"), "`some` is not a valid number", "microbatches: 8"),
            ("microbatches: 2\nmicrobatches: 3", Some("2:"), "has two lines `microbatches`", "leave one"),
            ("stages on ranks: 0 -1", Some("1:"), "`-1` is not a valid number", "0 1 1 0"),
            (
                "0: F0.0 B0.0\nstages on ranks:  # none",
                Some("2:"),
                "needs at least one stage",
                "as in `0 1 1 0`",
            ),
            ("0: F0.0\nmicrobatches: 65535\nstages on ranks: many", None, "are too many", "use fewer"),
            ("0: F0.0\n2: F2.0", None, "no list for rank 1", "add a line `1: ..`"),
            ("schedule: x", None, "has no action", "0: F0.0 B0.0"),
            ("0:\n1:", None, "has no action", "0: F0.0 B0.0"),
            ("99999999: F0.0", Some("1:"), "is not a valid number", "0: F0.0"),
            ("0: F0.18446744073709551615", None, "has 18446744073709551615 microbatches", "counted from 0"),
            (
                "microbatches: 0\n0: F0.3",
                None,
                "says `microbatches: 0`, but its lists use 4",
                "`microbatches: 4`",
            ),
            ("microbatches: 0\n0: G0", None, "has 0 microbatches", "counted from 0"),
        ] {
            let text = text.replace("many", &"0 ".repeat(65_535));
            let error = Schedule::from_text(&text).unwrap_err();
            assert_eq!(error.kind(), Kind::Config, "{text}");
            assert!(error.message().contains(what), "{text}: {error}");
            let detail = |label: &str| error.details().iter().find(|d| d.0 == label).map(|d| d.1.clone());
            assert!(detail("help").is_some_and(|h| h.contains(help)), "{text}: {error}");
            assert!(line.is_none_or(|l| detail("line").is_some_and(|d| d.starts_with(l))), "{text}: {error}");
        }
    }
}
