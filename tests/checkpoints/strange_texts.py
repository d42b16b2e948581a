"""Texts that tokenizers disagree on: scripts, emoji, runs of whitespace, control characters, broken-looking text."""

from __future__ import annotations

import random

_SAMPLES = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 12:30 — pay $1,234.56 (or 15%).",
    "def f(x):\n\treturn [y ** 2 for y in x if y != 0]  # a comment\n\n\nclass A:\n    pass\n",
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter en canoë au delà des îles.",
    "Zażółć gęślą jaźń. Příliš žluťoučký kůň. Đường phố Hà Nội rất đông người. Iğdır ılık süt.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Її ґанок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "人工智能正在改变世界。繁體中文測試！日本語のテキスト、カタカナとひらがな。한국어 문장입니다. ㄱㄴㄷ",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣٤ שלום עולם, מה שלומך? ܫܠܡܐ ދިވެހި",
    "नमस्ते दुनिया, क्या हाल है? বাংলা ভাষা தமிழ் మాట ಕನ್ನಡ മലയാളം ไทยภาษาสวย ភាសាខ្មែរ မြန်မာ ລາວ བོད་ཡིག ქართული Հայերեն አማርኛ",
    "😀😃🥲 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇫🇷🇩🇪 ❤️ ☕ ⌚️ 1️⃣ 🫠🫨 ♾️ ✂︎",
    "e\u0301 a\u0308\u0304 Z͑ͫ̓ͪ̂ͫ̽a̴̵̞l͖̣͉g̱̟o̥͎ ḗ́̂ o\u031b\u0323 \u1100\u1161\u11a8 n\u0303 ﬁ ﬃ ① ½ ㎏ Ａｂｃ",
    "\x00\x01\x02\x07\x08\x0b\x0c\x1b[31mred\x1b[0m\x7f\x80\x85\x9f\xad",
    "a\r\nb\rc\n\rd\u2028e\u2029f\u0085g\u00a0h\u2003i\u3000j\u200bk\u200dl\ufeffm\u2060n",
    "\ufffd\ufffd \ufffe \uffff \U0001fffe \U0010ffff \ue000 \U000f0000 \ud7ff ï»¿ â€™ Ã© \\xc3\\x28 \\ud800 %C3%28",
    "<0x41> <0x0A> <0xFF> <0xGG> <unk > <s> </s> <pad [MASK] <|endoftext|> <unused> <|im_start|",
    "<table><tr><td>1</td></tr></table> <h1>Title</h1><ul><li>x</li></ul> <br/> &amp; <DIV> <strong >",
    "$$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$$ ∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α∧¬β ⇒ γ ≠ ∅ ⟨ψ|φ⟩",
    '{"a": [1, 2.5e-3, null], "b": {"c": "\\u00e9\\n"}}\t\t| x | y |\n|---|---|\n',
    "https://example.org/a_b?c=d&e=%20#f user@example.org C:\\Users\\x\\*.txt ~/.bashrc --flag=value 0xDEADBEEF",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒮𝒸𝓇𝒾𝓅𝓉 𝟘𝟙𝟚 𐍈𐌰𐌻 𓀀𓂀 𒀀 𠜎𠜱𠝹 🀄 🂡 𝄞 ꙮ ⠓⠑⠇⠇⠕ ᚠᚢᚦ ᠮᠣᠩᠭᠣᠯ",
    "aaaaaaaaaaaaaaaaaaaaaaaaa AAAAAAAA hahahahahaha !!!!!!!!! ......... ---------- ======= ~~~~~ 0000000000 ababababab",
    "▁▁▁▁x ▁ _▁ a▁b ▁\n▁the▁▁end",
    "nevertheless antidisestablishmentarianism Donaudampfschifffahrtsgesellschaft hippopotomonstrosesquippedaliophobia",
]
_SPACES = [" " * 7, " " * 40, "\n" * 5, "\n" * 40, "\t" * 40, " \t\n \n\t", *" /  /   /\n/\n\n/\t/\t\t/ \n/\n /\t /\r\n/\u00a0/\u3000".split("/")]


def texts(count: int, seed: int = 0) -> list[str]:
    """`count` different texts, the same for the same seed: samples, pieces of them, and pieces shuffled together with whitespace."""
    rng = random.Random(seed)
    characters = sorted(set("".join(_SAMPLES)))
    found = dict.fromkeys([*_SAMPLES, *_SPACES, *(space + "x" + space for space in _SPACES)])
    while len(found) < count:
        kind = rng.randrange(4)
        if kind == 0:  # pieces of several samples
            parts = [_piece(rng, rng.choice(_SAMPLES)) for _ in range(rng.randint(1, 5))]
            found["".join(part + rng.choice(["", "", *_SPACES]) for part in parts)] = None
        elif kind == 1:  # any characters in any order
            found["".join(rng.choices(characters, k=rng.randint(1, 30)))] = None
        elif kind == 2:  # any code point at all, surrogates apart
            points = [rng.choice([rng.randrange(0x250), rng.randrange(0xD800), rng.randrange(0xE000, 0x11_0000)]) for _ in range(rng.randint(1, 12))]
            found["".join(map(chr, points))] = None
        else:  # whitespace against words
            words = rng.choice(_SAMPLES).split()
            found["".join(rng.choice(words) + rng.choice(_SPACES) for _ in range(rng.randint(1, 8)))] = None
    return list(found)[:count]


def _piece(rng: random.Random, text: str) -> str:
    begin = rng.randrange(len(text))
    return text[begin : begin + rng.randint(1, 40)]
