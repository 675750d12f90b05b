//! Suggestions for misspelled names ("did you mean").

/// Returns the candidate with the smallest edit distance from `word`, if that is at most half of its length (at least 1); the first
/// of several.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = word.chars().count().div_ceil(2).max(1);
    candidates
        .into_iter()
        .map(|candidate| (edits(word, candidate), candidate))
        .filter(|(edits, _)| *edits <= near)
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, candidate)| candidate)
}

/// Returns the case-insensitive edit distance with transpositions (optimal string alignment).
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) =
        (a.to_lowercase().chars().collect(), b.to_lowercase().chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = change.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        for (a, b, n) in [
            ("", "", 0),
            ("a", "", 1),
            ("tp", "pt", 1),
            ("tiny", "tinny", 1),
            ("dp", "TP", 1),
            ("abc", "xyz", 3),
        ] {
            assert_eq!((edits(a, b), edits(b, a)), (n, n), "{a} {b}");
        }
    }

    #[test]
    fn nearest_finds_close_names_only() {
        let axes = ["pp", "dp", "ep", "cp", "tp"];
        assert_eq!(nearest("tq", axes), Some("tp"));
        assert_eq!(nearest("pd", axes), Some("pp"));
        assert_eq!(nearest("model", axes), None);
        assert_eq!(nearest("gpt2-124", ["tiny", "gpt2-1558m", "gpt2-124m"]), Some("gpt2-124m"));
        assert_eq!(nearest("tpi", [] as [&str; 0]), None);
    }
}
