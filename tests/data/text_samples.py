"""Text to try tokenizers on, made here: many languages and scripts, emoji, code, white space, and rubbish."""

import random
import sysconfig
import unicodedata
from pathlib import Path

SENTENCES = """
The memory answers every query it's asked, and doesn't forget what we'll need: 12,345.67 of 1e-9!
Der Speicher beantwortet jede Frage; größer, schöner, süßer — „Straße“ und Fußgängerübergänge.
La mémoire répond à chaque question: l'été, cœur, naïveté, «déjà vu»… aujourd'hui.
La memoria responde a cada pregunta: ¿qué pasó mañana? ¡Ñandú, pingüino y corazón!
A memória responde à pergunta; não há coração sem emoção, avó e avô.
Pamięć odpowiada na każde pytanie: zażółć gęślą jaźń, łódź, źdźbło.
Paměť odpovídá na každou otázku: příliš žluťoučký kůň úpěl ďábelské ódy.
Hafıza her soruya cevap verir: İstanbul'da ığdır, çağ, şöyle, DIŞARI.
Minnet svarar på varje fråga: åäö, ÅÄÖ, smörgåsbord, kött.
Muisti vastaa jokaiseen kysymykseen: hääyöaie, yöpöytä.
Az emlékezet minden kérdésre válaszol: árvíztűrő tükörfúrógép.
Trí nhớ trả lời mọi câu hỏi: tiếng Việt có nhiều dấu, phở, bún chả, nghiêng.
Η μνήμη απαντά σε κάθε ερώτηση: Ελλάδα, ἀρχή, σοφός, Ὀδυσσεύς.
Память отвечает на каждый вопрос: съешь же ещё этих мягких французских булок, да выпей чаю.
Пам'ять відповідає на кожне питання: ґанок, їжак, щастя, об'єкт.
Паметта отговаря на всеки въпрос; Његош, Ђурђевдан, љубав, џеп.
Հիշողությունը պատասխանում է ամեն հարցի։
მეხსიერება პასუხობს ყველა კითხვას.
הזיכרון עונה על כל שאלה: שָׁלוֹם עֲלֵיכֶם, תל־אביב.
الذاكرة تجيب عن كل سؤال: مُحَمَّد، القُرآن، ٢٠٢٤، لا إله.
حافظه به هر پرسشی پاسخ می‌دهد: می‌خواهم، کتاب‌ها، ۱۲۳۴.
یادداشت ہر سوال کا جواب دیتی ہے۔
स्मृति हर प्रश्न का उत्तर देती है: क्षत्रिय, ज्ञान, हिन्दी, १२३।
স্মৃতি প্রতিটি প্রশ্নের উত্তর দেয়: বাংলাদেশ, ক্ষমতা, ১২৩।
நினைவகம் ஒவ்வொரு கேள்விக்கும் பதிலளிக்கிறது: தமிழ், ஸ்ரீ.
జ్ఞాపకం ప్రతి ప్రశ్నకు సమాధానం ఇస్తుంది. ಕನ್ನಡ ಭಾಷೆ. മലയാളം ഭാഷ. ગુજરાતી. ਪੰਜਾਬੀ. සිංහල.
ความทรงจำตอบทุกคำถาม: น้ำ ผู้ใหญ่ ๑๒๓ กรุงเทพฯ
ຄວາມຊົງຈຳຕອບທຸກຄຳຖາມ. မှတ်ဉာဏ်သည် မေးခွန်းတိုင်းကို ဖြေဆိုသည်။ ការចងចាំឆ្លើយរាល់សំណួរ។
བོད་ཡིག དྲན་པས་དྲི་བ་རེ་རེར་ལན་འདེབས། ᠮᠣᠩᠭᠣᠯ᠎ᠤᠨ ᠪᠢᠴᠢᠭ
记忆回答每一个问题：今天是二〇二四年，价格是￥１２３．４５。繁體中文，龍鳳龜。
記憶はすべての質問に答えます。カタカナ、ひらがな、漢字、ｶﾞｷﾞｸﾞ、がぎぐ。東京都２３区。
기억은 모든 질문에 답합니다. 한국어 텍스트, 각각의 글자, ㄱㄴㄷ ㅏㅑㅓ.
አማርኛ ጽሑፍ። Kiswahili: kumbukumbu hujibu kila swali. Yorùbá: ọ̀rọ̀ àti ìtàn. Hausa: ƙarfi, ɗaya.
ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ. ᐃᓄᒃᑎᑐᑦ. ⴰⵎⴰⵣⵉⵖ. 𐌲𐌿𐍄𐌰𐍂𐌰𐌶𐌳𐌰. 𝕄𝕒𝕥𝕙 𝓈𝒸𝓇𝒾𝓅𝓉 𝟙𝟚𝟛 𝑥² + 𝑦² = 𝑟².
∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β ≡ ¬(¬α ∨ β), ∑ᵢ₌₁ⁿ i = n(n+1)/2, ½ ⅓ Ⅷ ④ ㊷ ²³ x₁.
😀😃 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵 ❤️‍🔥 ☎️ 1️⃣ 🧑🏿‍🚀 ™️ ©® 🤷🏻‍♀️!!! 🥹🫠🫨🪿
I'M, WE'LL, THEY'VE, she'd, 'S 'T it’s don’t 'ſ 'LL'RE x'mas rock'n'roll o'clock's
https://example.org/path?query=1&x=%20#frag user.name+tag@mail.example.com C:\\Users\\name\\file.txt #hashtag @user
"""

CODE = r"""
#include <vector>
template <typename T> auto f(const std::vector<T>& x) -> decltype(x[0]) { return x.empty() ? T{} : x[0] * 0x1F + 1'0; }
def f(x, *args, **kw):	# a tab
    '''It's a docstring.'''
    return {k: v[::-1] for k, v in kw.items() if not k.startswith("__")} | {"a": [1, 2.5e-10, None]}


SELECT "t"."a", COUNT(*) FROM t WHERE a <> 'it''s' AND b >= 100 GROUP BY 1 HAVING COUNT(*) > 10; -- done
for (let i = 0; i < 10; ++i) { console.log(`${i}: ${xs[i]?.name ?? "none"}`); }  // =>  !==  &&=
<div class="a b" id='c'>&nbsp;&#x27;</div><!-- ===== ----- ..... -->
$ grep -rn --include='*.py' "^import" . | sort | uniq -c | sort -rn | head -20 > /dev/null 2>&1
| a | b |
|---|:-:|
| 1 | 2 |
"""

SPACES = [" ", "  ", "    ", "\t", "\n", "\r\n", "\r", "\n\n\n", " \n", "\n ", "\x0b", "\x0c", "\x85", "\xa0", "\u1680"]
SPACES += [
    "\u180e",
    "\u2003",
    "\u200b",
    "\u2028",
    "\u2029",
    "\u202f",
    "\u205f",
    "\u3000",
    "\ufeff",
    "\x1c",
    "\x00",
    "\x7f",
]
MARKS = ["\u0301", "\u0323", "\u0327", "\u0308\u0304", "\u0345", "\u1100\u1161\u11a8", "\uac00\u11a8", "\u0915\u093c"]
MARKS += ["\u212b", "\u2126", "\ufb01", "\uf900", "\u0958", "\u1e9b\u0323", "\u0344", "\u0340", "\U0001d15e", "\u0374"]


def corpus(size=400_000):
    """Text to learn a BPE from: the samples, and code that comes with Python."""
    text = (SENTENCES + CODE) * 20
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")):
        if len(text) >= size:
            break
        text += path.read_text(encoding="utf-8", errors="replace")
    return text[:size]


def characters():
    """Every character there is or may be soon, but for private use and the empty planes."""
    codes = [*range(0xD800), *range(0xF900, 0x32400), *range(0xE0000, 0xE0200)]
    return [chr(code) for code in codes if unicodedata.category(chr(code)) != "Co"]


def mixtures(count, seed):
    """Random texts from pieces of all kinds."""
    rng = random.Random(seed)
    words = SENTENCES.split() + CODE.split()
    letters = characters()

    def piece():
        kind = rng.randrange(9)
        if kind <= 2:
            return rng.choice(words)
        if kind == 3:
            return rng.choice(SPACES) * rng.randint(1, 3)
        if kind == 4:
            return "".join(rng.choice(letters) for _ in range(rng.randint(1, 6)))
        if kind == 5:
            return rng.choice("aeouncAEO가") + "".join(rng.choice(MARKS) for _ in range(rng.randint(1, 3)))
        if kind == 6:
            return str(rng.randint(0, 10 ** rng.randint(1, 12)))
        if kind == 7:
            return rng.choice("!?.,;:-=_/#*'\"") * rng.choice([1, 1, 2, 3, 40])
        return rng.choice([" ", " ", "\n", "'", "’"])

    return ["".join(piece() for _ in range(rng.randint(1, 60))) for _ in range(count)]


def malformed(count, seed):
    """Byte strings that are mostly UTF-8."""
    rng = random.Random(seed)
    bad = [b"\x80", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc3"]
    bad += [b"\xf0\x80\x80\x80", b"\xe0\x80\xaf", b"\xfe\xfe", b"\xf8\x88\x80\x80\x80"]
    made = []
    for text in mixtures(count, seed + 1):
        raw = bytearray(text.encode())
        for _ in range(rng.randint(1, 4)):
            at = rng.randint(0, len(raw))
            if rng.random() < 0.5:
                raw[at:at] = rng.choice(bad)
            else:
                del raw[at : at + 1]
        made.append(bytes(raw))
    return made
