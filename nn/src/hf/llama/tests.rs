//! What config files of the family say, and what is refused.

use super::windows::{WHOLE, WINDOWED};
use super::*;
use shardgrad_tensor::{Error, Kind};

/// The published 8B model of Llama 3.1.
const PUBLISHED: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
    "vocab_size": 128256
}"#;

fn parse(kind: LlamaKind, text: &str) -> Result<LlamaConfig> {
    LlamaConfig::parse(kind, Path::new("config.json"), text)
}

fn changed(kind: LlamaKind, from: &str, to: &str) -> Result<LlamaConfig> {
    assert!(PUBLISHED.contains(from), "{from}");
    parse(kind, &PUBLISHED.replacen(from, to, 1))
}

fn fault(from: &str, to: &str) -> String {
    let error: Error = changed(LlamaKind::Llama, from, to).unwrap_err();
    assert_eq!(error.kind(), Kind::Checkpoint);
    assert_eq!(error.message(), "config.json: describes a model that this version does not run");
    error.details()[0].1.clone()
}

#[test]
fn the_published_config_is_the_preset_and_is_written_back() {
    let read = parse(LlamaKind::Llama, PUBLISHED).unwrap();
    let preset = LlamaConfig::preset("llama-8b").unwrap();
    assert_eq!(LlamaConfig { others: Map::new(), dtype: DType::F32, ..read.clone() }, preset);
    assert_eq!(read.others["eos_token_id"], json!([128001, 128008, 128009]));
    assert_eq!(parse(LlamaKind::Llama, &read.to_json()).unwrap(), read);
    let (before, after): (Map<String, Value>, Map<String, Value>) =
        (serde_json::from_str(PUBLISHED).unwrap(), serde_json::from_str(&read.to_json()).unwrap());
    for (name, value) in before {
        assert_eq!(after[&name], value, "{name}");
    }
    assert_eq!(after.len(), 25, "the same fields and head_dim");
}

#[test]
fn every_member_is_read_back() {
    for kind in LlamaKind::EVERY {
        let mut config = LlamaConfig::new(kind, 100, 50, [24, 36], 2, [6, 3]);
        config.head_dim = 8;
        config.tie_word_embeddings = true;
        config.rotary.scaling = RotaryScaling::Linear { factor: 2.0 };
        if kind != LlamaKind::Llama {
            let some = matches!(kind, LlamaKind::Qwen2 | LlamaKind::Qwen3);
            config.windows = vec![Some(10), (!some).then_some(10)];
        }
        let text = config.to_json();
        let mut read = parse(kind, &text).unwrap();
        read.others.clear();
        assert_eq!(read, config, "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["model_type"], kind.name());
        assert_eq!(config.attention_bias, kind == LlamaKind::Qwen2);
        assert!(!config.output_bias());
    }
}

#[test]
fn newer_files_say_theta_elsewhere() {
    let text = r#"{"vocab_size": 9, "max_position_embeddings": 8, "hidden_size": 8, "intermediate_size": 4,
        "num_hidden_layers": 1, "num_attention_heads": 2, "dtype": "float16",
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}}"#;
    let config = parse(LlamaKind::Llama, text).unwrap();
    assert_eq!(config.rotary.theta, 500.0);
    assert_eq!(config.rotary.scaling, RotaryScaling::Linear { factor: 2.0 });
    assert_eq!((config.dtype, config.num_key_value_heads, config.head_dim), (DType::F16, 2, 4));
    let value: Value = serde_json::from_str(&config.to_json()).unwrap();
    assert_eq!((&value["rope_theta"], &value["rope_parameters"]), (&json!(500.0), &Value::Null));
    // Readers take one of two numbers that differ, and not all the same one.
    let both = text.replacen("\"dtype\"", "\"rope_theta\": 100.0, \"dtype\"", 1);
    let error = parse(LlamaKind::Llama, &both).unwrap_err();
    let told = "`rope_theta` is 100, but `rope_theta` of `rope_parameters` is 500";
    assert_eq!(error.details()[0].1, told);
}

#[test]
fn windows_are_read_as_each_member_says_them() {
    let with = |kind, field: &str| changed(kind, "\"use_cache\": true", field);
    let windows = |kind, field: &str| with(kind, field).unwrap().windows;
    let (all, none) = (vec![Some(4096); 32], Vec::new());
    assert_eq!(windows(LlamaKind::Mistral, "\"sliding_window\": 4096"), all);
    assert_eq!(windows(LlamaKind::Mistral, "\"x\": 1"), all, "the default is a window");
    assert_eq!(windows(LlamaKind::Mistral, "\"sliding_window\": null"), none);
    assert_eq!(windows(LlamaKind::Mistral, "\"sliding_window\": 131072"), none, "it hides no key");
    assert_eq!(windows(LlamaKind::Llama, "\"sliding_window\": 4096"), none, "a llama has none");
    let off = "\"sliding_window\": 4096, \"use_sliding_window\": false";
    assert_eq!(windows(LlamaKind::Qwen2, off), none);
    let on = "\"sliding_window\": 4096, \"use_sliding_window\": true";
    let last: Vec<_> = (0..32).map(|layer| (layer >= 28).then_some(4096)).collect();
    assert_eq!(windows(LlamaKind::Qwen3, on), last, "the first 28 blocks have none");
    assert_eq!(windows(LlamaKind::Qwen2, &format!("{on}, \"max_window_layers\": 0")), all);
    assert_eq!(windows(LlamaKind::Qwen2, &format!("{on}, \"max_window_layers\": 32")), none);
    let types: Vec<&str> = (0..32).map(|i| if i % 2 == 0 { WINDOWED } else { WHOLE }).collect();
    let found = windows(LlamaKind::Qwen2, &format!("{on}, \"layer_types\": {types:?}"));
    assert!((0..32).all(|i| found[i].is_some() == (i % 2 == 0)), "{found:?}");
    let told = |kind, field: &str| with(kind, field).unwrap_err().details()[0].1.clone();
    assert_eq!(
        told(LlamaKind::Mistral, "\"sliding_window\": 0"),
        "`sliding_window` is 0, which is outside of 1..=16777216"
    );
    assert_eq!(
        told(LlamaKind::Mistral, "\"sliding_window\": \"x\""),
        "`sliding_window` is \"x\", which is no number of keys"
    );
    let text = "`layer_types` is not a list of 32 words sliding_attention or full_attention";
    assert_eq!(told(LlamaKind::Qwen3, &format!("{on}, \"layer_types\": [\"full_attention\"]")), text);
    let odd = format!("{on}, \"layer_types\": {:?}", ["chunked_attention"; 32]);
    assert_eq!(told(LlamaKind::Qwen3, &odd), text);
}

/// The windows of what is read of a config that was read of a text and then changed, or what of it the file cannot say.
fn kept(kind: LlamaKind, field: &str, windows: &[Option<usize>]) -> Result<Vec<Option<usize>>, String> {
    let mut config = changed(kind, "\"use_cache\": true", field).unwrap();
    config.num_hidden_layers = windows.len();
    config.windows = windows.to_vec();
    let read = parse(kind, &config.to_json()).unwrap();
    match config.unsaid(&read)[..] {
        [] => Ok((0..windows.len()).map(|layer| read.window(layer)).collect()),
        [ref fault, ..] => Err(fault.clone()),
    }
}

#[test]
fn windows_that_were_changed_are_what_is_written() {
    let all = "\"sliding_window\": 4096";
    let some = "\"sliding_window\": 4096, \"use_sliding_window\": true, \"max_window_layers\": 1";
    for windows in [[None, None], [Some(9), Some(9)], [Some(4096), Some(4096)]] {
        for field in ["\"x\": 1", all, "\"sliding_window\": null"] {
            assert_eq!(kept(LlamaKind::Mistral, field, &windows).unwrap(), windows, "{field}");
        }
    }
    for windows in [[None, None], [Some(9), Some(9)], [None, Some(4096)], [Some(4096), None]] {
        for field in ["\"x\": 1", all, some] {
            assert_eq!(kept(LlamaKind::Qwen3, field, &windows).unwrap(), windows, "{field}");
        }
    }
    // What says the same stays as it was read.
    let mut read = changed(LlamaKind::Qwen2, "\"use_cache\": true", some).unwrap();
    let field = |config: &LlamaConfig, name: &str| {
        serde_json::from_str::<Map<String, Value>>(&config.to_json()).unwrap().get(name).cloned()
    };
    assert_eq!(field(&read, "max_window_layers"), Some(json!(1)));
    assert_eq!(field(&read, "layer_types"), None);
    read.windows.clear();
    assert_eq!(field(&read, "use_sliding_window"), None);
    // No field that is kept takes the place of one that is told.
    read.others.insert("hidden_size".to_string(), json!(1));
    assert_eq!(field(&read, "hidden_size"), Some(json!(4096)));
}

#[test]
fn what_no_file_of_a_member_can_say_is_told() {
    let plain = "\"x\": 1";
    assert_eq!(
        kept(LlamaKind::Llama, plain, &[Some(9), None]).unwrap_err(),
        "`windows` is [Some(9), None]; a llama file holds none"
    );
    assert_eq!(
        kept(LlamaKind::Mistral, plain, &[Some(9), None]).unwrap_err(),
        "`windows` is [Some(9), None]; a mistral file holds one, of all blocks"
    );
    assert_eq!(
        kept(LlamaKind::Qwen2, plain, &[Some(4), Some(8)]).unwrap_err(),
        "`windows` is [Some(4), Some(8)]; a qwen2 file holds one, of some blocks"
    );
    let mut config = LlamaConfig::new(LlamaKind::Qwen2, 9, 8, [8, 4], 1, [2, 1]);
    config.attention_bias = false;
    let read = parse(config.kind, &config.to_json()).unwrap();
    assert_eq!(config.unsaid(&read), ["`attention_bias` is false; a qwen2 is read with true"]);
}

#[test]
fn what_transformers_takes_is_read() {
    assert!(changed(LlamaKind::Llama, "\"silu\"", "\"swish\"").is_ok(), "another word for it");
    let (from, null) = ("\"num_key_value_heads\": 8", "\"num_key_value_heads\": null");
    for kind in LlamaKind::EVERY.into_iter().filter(|kind| !kind.has_experts()) {
        assert_eq!(changed(kind, from, null).unwrap().num_key_value_heads, 32);
        let silent = changed(kind, from, "\"x\": 1");
        match kind {
            LlamaKind::Llama => assert_eq!(silent.unwrap().num_key_value_heads, 32),
            _ => assert!(silent.unwrap_err().to_string().contains("`num_key_value_heads` is missing")),
        }
    }
}

/// The experts that a file of a member tells beside the fields of the published one, or what is wrong.
fn experts(kind: LlamaKind, fields: &str) -> Result<ExpertsConfig, String> {
    let read = changed(kind, "\"use_cache\": true", fields);
    read.map(|config| config.experts.unwrap()).map_err(|e| e.details()[0].1.clone())
}

#[test]
fn experts_are_read_as_each_member_tells_them() {
    let mixtral = "\"num_local_experts\": 8, \"num_experts_per_tok\": 2";
    assert_eq!(experts(LlamaKind::Mixtral, mixtral), Ok(ExpertsConfig::new(8, 2, 14_336)));
    let told = "\"num_experts\": 9, \"num_experts_per_tok\": 3, \"moe_intermediate_size\": 5, \"norm_topk_prob\": true";
    assert_eq!(experts(LlamaKind::Qwen3Moe, told), Ok(ExpertsConfig::new(9, 3, 5)));
    // Newer releases write one name for both members, and it is written back.
    let newer = told.replace("num_experts\"", "num_local_experts\"");
    assert_eq!(experts(LlamaKind::Qwen3Moe, &newer), experts(LlamaKind::Qwen3Moe, told));
    let read = changed(LlamaKind::Qwen3Moe, "\"use_cache\": true", &newer).unwrap();
    let written: Value = serde_json::from_str(&read.to_json()).unwrap();
    assert_eq!((&written["num_local_experts"], written.get("num_experts")), (&json!(9), None));
    let more = format!(
        "{told}, \"decoder_sparse_step\": 2, \"mlp_only_layers\": [3, 5], \"output_router_logits\": true, \
         \"router_aux_loss_coef\": 0.5"
    );
    let some = experts(LlamaKind::Qwen3Moe, &more).unwrap();
    assert_eq!((some.output_router_logits, some.router_aux_loss_coef), (true, 0.5));
    assert_eq!((0..8).filter(|layer| some.has(*layer)).collect::<Vec<_>>(), [1, 7]);
    let fault = |kind, fields: &str| experts(kind, fields).unwrap_err();
    assert_eq!(fault(LlamaKind::Mixtral, "\"num_experts_per_tok\": 2"), "`num_local_experts` is missing");
    assert_eq!(
        fault(LlamaKind::Mixtral, "\"num_local_experts\": 2, \"num_experts_per_tok\": 3"),
        "`num_experts_per_tok` is 3 of 2 experts"
    );
    assert!(fault(LlamaKind::Mixtral, &format!("{mixtral}, \"router_jitter_noise\": 0.1")).contains("noisy"));
}

#[test]
fn what_no_file_can_say_of_experts_is_told() {
    let mut config = LlamaConfig::new(LlamaKind::Mixtral, 9, 8, [8, 4], 1, [2, 1]);
    let unsaid = |config: &LlamaConfig| config.unsaid(&parse(config.kind, &config.to_json()).unwrap());
    assert!(unsaid(&config).is_empty());
    config.experts = Some(ExpertsConfig { norm_topk_prob: false, ..ExpertsConfig::new(8, 2, 4) });
    assert!(unsaid(&config)[0].starts_with("`experts` is Some(ExpertsConfig {"), "{:?}", unsaid(&config));
}

#[test]
fn each_unsupported_field_is_named() {
    assert_eq!(fault("\"silu\"", "\"gelu\""), "`hidden_act` is \"gelu\"; run is \"silu\"");
    assert_eq!(fault("\"hidden_size\": 4096,", ""), "`hidden_size` is missing");
    assert_eq!(
        fault("\"num_key_value_heads\": 8", "\"num_key_value_heads\": 7"),
        "`num_attention_heads` is 32, which 7 key heads (`num_key_value_heads`) do not divide"
    );
    assert_eq!(
        fault("\"hidden_size\": 4096", "\"hidden_size\": 4100"),
        "`hidden_size` is 4100, which 32 heads (`num_attention_heads`) do not divide"
    );
    assert!(fault("\"pretraining_tp\": 1", "\"head_dim\": 5").starts_with("heads of 5 channels"));
    assert_eq!(
        fault("\"llama3\"", "\"yarn\""),
        "`rope_scaling` is of type \"yarn\"; run are default, linear, llama3"
    );
    assert_eq!(fault("\"factor\": 8.0,", ""), "`factor` of `rope_scaling` is missing");
    assert_eq!(
        fault("8192", "0"),
        "`original_max_position_embeddings` is 0, which is outside of 1..=16777216"
    );
    assert!(fault("500000.0", "0.5").starts_with("`rope_theta` is 0.5"));
    assert!(fault("\"use_cache\": true", "\"partial_rotary_factor\": 0.5").contains("all channels"));
    assert!(fault("\"use_cache\": true", "\"quantization_config\": {}").contains("quantized"));
    let biased = changed(LlamaKind::Mistral, "\"attention_bias\": false", "\"attention_bias\": true");
    assert!(biased.unwrap_err().to_string().contains("a mistral has none"));
}

#[test]
fn all_faults_are_told_at_once() {
    let error = parse(LlamaKind::Qwen3, r#"{"hidden_size": 0, "hidden_act": "relu"}"#).unwrap_err();
    let faults: Vec<&str> = error.details().iter().map(|d| d.1.split('`').nth(1).unwrap()).collect();
    let expected = [
        "hidden_act",
        "vocab_size",
        "max_position_embeddings",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ];
    assert_eq!(faults, expected);
}
