"""The pages in Traditional Chinese: the code is that of the English ones, the characters and words are Taiwan's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.page import Page

ROOT = Path(__file__).parents[2]
# Each with the English page that it follows.
PAGES = {
    "README.zh-TW.md": "README.md",
    "docs/zh-TW/guide.md": "docs/guide.md",
    "docs/zh-TW/script.md": "docs/script.md",
}

# A term, and the English that stands behind it where it comes first on a page. The guide has all of them.
TERMS = {
    "梯度累積": "gradient accumulation",
    "微批次": "micro-batch",
    "程序": "process",
    "執行緒": "thread",
    "節點": "node",
    "埠": "port",
    "檢查點": "checkpoint",
    "指紋": "fingerprint",
    "資料載入器": "data loader",
    "同步批次正規化": "synchronized batch normalization",
}
ELSEWHERE = [
    "數據", "進程", "線程", "端口", "內存", "默認", "代碼", "文件夾", "網絡", "服務器", "信息", "運行", "調用",
    "接口", "緩存", "分布式", "分佈式", "變量", "循環", "打印", "加載", "用戶", "設備", "優化器", "哈希", "遠程",
    "集群", "通信", "內核", "軟件", "硬件", "屏幕", "創建", "字符", "命令行", "源碼", "鏈接", "質量", "批量",
    "支持", "兼容", "視頻", "存儲", "程序員", "保存", "隊列", "算法", "函數", "日誌", "文檔", "文件名", "數組",
    "對象",
]  # fmt: skip


@pytest.fixture(params=PAGES)
def pages(request: pytest.FixtureRequest) -> tuple[Page, Page]:
    """The Chinese page and the English one."""
    return Page(ROOT / request.param), Page(ROOT / PAGES[request.param])


def test_the_blocks_and_sections_are_the_same(pages: tuple[Page, Page]) -> None:
    ours, theirs = ([(b.language, b.title, b.code) for b in page.blocks] for page in pages)
    assert ours == theirs


def test_commands_are_those_of_the_english_page(pages: tuple[Page, Page]) -> None:
    def commands(page: Page) -> set[str]:
        lines = [line.split("  #")[0].strip() for line in page.prose.splitlines() if line.startswith("    ")]
        return {line for line in lines if not line.startswith("#")}

    assert commands(pages[0]) == commands(pages[1])


def test_characters_and_words_are_those_of_taiwan(pages: tuple[Page, Page]) -> None:
    text = pages[0].text
    unknown = {c for c in text if "\u4e00" <= c <= "\u9fff" and not c.encode("big5", "ignore")}
    assert not unknown  # simplified characters, most likely
    assert [word for word in ELSEWHERE if word in text] == []


def test_a_term_comes_with_its_english_word_first(pages: tuple[Page, Page]) -> None:
    prose = pages[0].prose
    for term, english in TERMS.items():
        place = prose.find(term)
        assert place < 0 or prose[place:].startswith(f"{term}（{english}"), term


def test_the_guide_has_all_terms() -> None:
    prose = Page(ROOT / "docs" / "zh-TW" / "guide.md").prose
    assert [term for term in TERMS if term not in prose] == []


def test_links_lead_somewhere(pages: tuple[Page, Page]) -> None:
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.text):
            assert (page.folder / target).exists(), target
